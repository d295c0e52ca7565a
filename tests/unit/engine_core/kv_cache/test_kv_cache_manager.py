from collections.abc import Iterable, Sequence

import pytest

from atom.shared.messages.engine import pack_ids
from atom.shared.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec, SlidingWindowSpec
from engine_core.kv_cache import kv_cache_manager
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.kv_cache_manager import PLACEHOLDER, KVCacheManager
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.requests.token_ids import Prompt, TokenIds

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)
STATE = RecurrentStateSpec(bytes_per_slot=1)
WINDOW = SlidingWindowSpec(block_size=4, bytes_per_block=1, window=6)


def manager(
    specs: Sequence[KVSpec] = (FULL,), blocks: int = 16, caching: bool = True, seed: int = 3
) -> KVCacheManager:
    return KVCacheManager(specs, [blocks] * len(specs), 64, seed, caching)


def new(kv: KVCacheManager, token_ids: Iterable[int] = (), salt: str = "") -> RequestBlocks:
    """Empty tables of a request with this prompt."""
    return kv.new_blocks(TokenIds(Prompt(pack_ids(token_ids), salt)))


def admit(kv: KVCacheManager, blocks: RequestBlocks) -> int | None:
    """Tokens of the cached prefix; None if there is no room."""
    hits = kv.find_prefix(blocks)
    assert hits is not None
    return hits * kv.block_size if kv.admit(blocks, hits) else None


def cached(kv: KVCacheManager, *token_ids: int, salt: str = "") -> int | None:
    """Tokens of a new request that it finds in the cache; None if there is no room for the rest."""
    return admit(kv, new(kv, token_ids, salt))


def computed(kv: KVCacheManager, *token_ids: int, salt: str = "") -> RequestBlocks:
    """Tables of a sequence that is computed and cached."""
    blocks = new(kv, token_ids, salt)
    prefix = admit(kv, blocks)
    assert prefix is not None and kv.extend(blocks, prefix, len(token_ids)) is not None
    kv.cache(blocks, len(token_ids), step=0)
    return blocks


def check(kv: KVCacheManager, *owners: RequestBlocks) -> None:
    for _ in kv.check_integrity(owners):
        pass


def test_groups_need_one_block_size() -> None:
    other = FullAttentionSpec(block_size=8, bytes_per_block=1)
    with pytest.raises(ValueError, match=r"one common block size, not \[4, 8\]"):
        manager([FULL, other])


def test_extend_allocates_every_partial_block() -> None:
    kv = manager([FULL, FULL])
    blocks = new(kv, range(5))
    assert admit(kv, blocks) == 0
    added = kv.extend(blocks, 0, 5)
    assert added is not None and [len(group) for group in added] == [2, 2]
    assert kv.extend(blocks, 5, 8) == []
    assert [len(table) for table in blocks.tables] == [2, 2]
    check(kv, blocks)


def test_groups_get_blocks_together_or_not_at_all() -> None:
    kv = KVCacheManager([FULL, FULL], [4, 2], 64, 3)
    blocks = new(kv)
    assert kv.extend(blocks, 0, 12) is None
    assert blocks.tables == [[], []] and kv.num_used == 0


def test_admission_needs_room_for_all_known_tokens() -> None:
    kv = manager(blocks=3)
    first = computed(kv, *range(4))
    refused = new(kv, range(100, 109))
    assert admit(kv, refused) is None
    assert refused.tables == [[]]
    blocks = new(kv, range(100, 108))
    assert admit(kv, blocks) == 0
    check(kv, first, blocks)


def test_a_common_beginning_is_shared_while_in_use_and_after() -> None:
    kv = manager()
    first = computed(kv, *range(10))
    second = computed(kv, *range(8), 50, 51)
    assert second.tables[0][:2] == first.tables[0][:2] and second.tables[0][2] != first.tables[0][2]
    check(kv, first, second)
    kv.free(first)
    kv.free(second)
    assert kv.num_used == 0
    assert cached(kv, *range(10)) == 8


def test_one_token_is_always_left_to_compute() -> None:
    kv = manager()
    computed(kv, *range(8))
    assert cached(kv, *range(8)) == 4
    assert cached(kv, *range(9)) == 8


def test_hits_count_as_room() -> None:
    kv = manager(blocks=3)
    kv.free(computed(kv, *range(9)))
    blocks = new(kv, range(12))
    assert admit(kv, blocks) == 8
    check(kv, blocks)
    # The free blocks are now only one: hits that are free may not be counted twice.
    assert cached(kv, *range(8), 60, 61, 62, 63, 64) is None


def test_nothing_is_shared_with_caching_off() -> None:
    kv = manager(caching=False)
    computed(kv, *range(8))
    assert cached(kv, *range(8)) == 0


def test_the_digest_covers_everything_before_a_block() -> None:
    kv = manager()
    computed(kv, *range(8))
    computed(kv, 9, 9, 9, 9)
    assert cached(kv, 9, 9, 9, 9, *range(4, 8), 0) == 4


def test_the_seed_enters_the_digests() -> None:
    digests = []
    for seed in (1, 2):
        kv = manager(seed=seed)
        digests.append(computed(kv, *range(8)).tokens.prompt.digests)
    assert not set(digests[0]) & set(digests[1])


@pytest.mark.parametrize("specs", [[FULL], [FULL, WINDOW]])
def test_a_salt_keeps_equal_tokens_apart(specs: list[KVSpec]) -> None:
    kv = manager(specs, blocks=32)
    owners = [computed(kv, *range(13), salt=salt) for salt in ("", "one", "two")]
    blocks = [
        tuple(table[live:]) for one in owners for table, live in zip(one.tables, one.first_live, strict=True)
    ]
    for group in range(len(specs)):
        taken = [block for table in blocks[group :: len(specs)] for block in table]
        assert len(set(taken)) == len(taken), "two salts share a block"
    assert len({hash_input for one in owners for hash_input in one.tokens.prompt.hash_inputs}) == 9
    for salt, hits in [("", 12), ("one", 12), ("two", 12), ("three", 0), ("on", 0)]:
        again = new(kv, range(13), salt=salt)
        assert admit(kv, again) == hits
        kv.free(again)
    check(kv, *owners)


def test_salts_are_distinguished_even_where_digests_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_manager, "xxh64_digest", lambda hash_input, seed: b"the same")
    kv = manager()
    computed(kv, *range(8), salt="one")
    assert cached(kv, *range(8), salt="two") == 0


def test_a_salt_is_never_taken_for_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    beginning = pack_ids(range(4))
    monkeypatch.setattr(
        kv_cache_manager,
        "xxh64_digest",
        lambda hash_input, seed: b"a digest" if hash_input == beginning else hash_input,
    )
    kv = manager()
    first = computed(kv, *range(8))
    assert first.tokens.prompt.digests[0] == b"a digest"
    assert cached(kv, *range(4, 9), salt="a digest") == 0


def test_a_sequence_without_hits_is_computed_and_cached() -> None:
    kv = manager()
    first = computed(kv, *range(10))
    blocks = new(kv, range(12))
    assert kv.admit(blocks, hits=0)
    assert kv.extend(blocks, 0, 12) is not None
    assert not set(blocks.tables[0]) & set(first.tables[0])
    kv.cache(blocks, 12, step=0)
    check(kv, first, blocks)
    assert cached(kv, *range(13)) == 12


def test_equal_digests_of_different_tokens_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_manager, "xxh64_digest", lambda hash_input, seed: b"the same")
    kv = manager()
    computed(kv, *range(8))
    assert cached(kv, 7, 7, 7, 7, *range(4, 8), 0) == 0
    other = computed(kv, 7, 7, 7, 7, 8, 8, 8, 8, 9)
    assert other.collided and other.num_cached == 0


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    kv = manager(blocks=5)
    kv.free(computed(kv, *range(16)))
    blocks = new(kv)
    assert kv.extend(blocks, 0, 12) is not None  # the never used block, and the last two of the four
    kv.free(blocks)
    assert cached(kv, *range(17)) == 8


def test_blocks_that_leave_the_window_are_freed() -> None:
    kv = manager([FULL, WINDOW])
    blocks = new(kv)
    kv.extend(blocks, 0, 12)
    kv.extend(blocks, 12, 13)  # position 12 sees 7 .. 12
    assert blocks.first_live == [0, 1]
    assert blocks.tables[1][0] == PLACEHOLDER and len(blocks.tables[1]) == 4
    assert kv.pools[1].num_free == 16 - 3 and kv.pools[0].num_free == 16 - 4
    check(kv, blocks)


def evict_all_but(pool: BlockPool, kept: list[int]) -> None:
    """Make a pool whose blocks are all free forget the hash_input of the others."""
    pool.share(kept)
    pool.free([*pool.allocate(pool.num_free), *kept])


def test_a_window_group_needs_only_visible_blocks() -> None:
    kv = manager([FULL, WINDOW])
    first = computed(kv, *range(24))
    seen = first.tables[1][4:6]  # position 24 sees 19 .. 24
    kv.free(first)
    evict_all_but(kv.pools[1], seen)
    blocks = new(kv, [*range(24), 99])
    assert admit(kv, blocks) == 24
    assert blocks.first_live == [0, 4] and blocks.tables[1] == [PLACEHOLDER] * 4 + seen
    assert len(blocks.tables[0]) == 6
    check(kv, blocks)


def test_a_prefix_shrinks_to_what_all_groups_can_continue() -> None:
    kv = manager([FULL, WINDOW])
    first = computed(kv, *range(24))
    kept = first.tables[1][1:4]
    kv.free(first)
    evict_all_but(kv.pools[1], kept)
    # 24 and 20 tokens would need window blocks 5 and 4; 16 tokens need 2 and 3.
    assert cached(kv, *range(24), 99) == 16


def test_a_request_of_any_length_fits_a_window_group() -> None:
    kv = KVCacheManager([WINDOW], [3], max_chunk=4, seed=1)
    assert kv.can_ever_hold(10_000)
    assert not KVCacheManager([WINDOW], [2], max_chunk=4, seed=1).can_ever_hold(10_000)
    assert not KVCacheManager([FULL], [4], max_chunk=4, seed=1).can_ever_hold(17)


def test_a_state_is_one_slot_from_the_first_token_to_the_last() -> None:
    kv = KVCacheManager([STATE, FULL], [2, 8], 64, 3, enable_prefix_caching=False)
    owners = [new(kv, range(5)) for _ in range(2)]
    for blocks in owners:
        assert admit(kv, blocks) == 0
        added = kv.extend(blocks, 0, 5)
        assert added is not None and [len(group) for group in added] == [1, 2]
        assert kv.extend(blocks, 5, 8) == []
    added = kv.extend(owners[0], 8, 9)
    assert added is not None and [len(group) for group in added] == [0, 1]
    kv.check_covers(owners[0], 9)
    check(kv, *owners)
    assert cached(kv, 1) is None, "no slot is free"
    kv.free(owners[0])
    third = new(kv, [1])
    assert admit(kv, third) == 0 and kv.extend(third, 0, 1) is not None
    check(kv, owners[1], third)
