"""States are saved at ends of blocks, found with the blocks before them, and restored to other slots."""

from collections.abc import Sequence

import pytest

from atom.shared.messages.engine import pack_ids
from atom.shared.messages.worker import FullAttentionSpec, RecurrentStateSpec, StateCopy
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.requests.token_ids import Prompt, TokenIds

BLOCK = 4
INTERVAL = 32


def manager(slots: int = 4, caching: bool = True, blocks: int = 64) -> KVCacheManager:
    specs = [FullAttentionSpec(BLOCK, 1), RecurrentStateSpec(1)]
    return KVCacheManager(specs, [blocks, slots], 64, 3, caching, state_interval=INTERVAL)


def new(kv: KVCacheManager, length: int, first: int = 0) -> RequestBlocks:
    return kv.new_blocks(TokenIds(Prompt(pack_ids(range(first, first + length)), "")))


def admit(kv: KVCacheManager, blocks: RequestBlocks) -> int:
    """Blocks of the cached prefix; computes one token after them."""
    kv.begin_iteration()
    hits = kv.find_prefix(blocks)
    assert hits is not None and kv.admit(blocks, hits)
    assert kv.extend(blocks, hits * BLOCK, hits * BLOCK + 1) is not None
    kv.restore_states(blocks, hits)
    return hits


def compute(kv: KVCacheManager, blocks: RequestBlocks, start: int, end: int, step: int) -> None:
    """One chunk, and the end of its step."""
    assert kv.extend(blocks, start, end) is not None
    kv.cache(blocks, end, step)
    kv.save_prompt_state(blocks, end)


def check(kv: KVCacheManager, owners: Sequence[RequestBlocks]) -> None:
    for _ in kv.check_integrity(owners):
        pass


@pytest.mark.parametrize(
    ("start", "end", "known", "expected"),
    [
        (0, 15, 15, 15),  # 12 are fewer than four blocks
        (0, 19, 19, 16),  # the last full block's end
        (0, 16, 16, 16),  # a token must be left to sample: 12
        (0, 100, 100, 32),
        (32, 100, 100, 64),
        (64, 100, 100, 96),
        (28, 100, 100, 64),  # 32 is too near
        (0, 20, 100, 20),
        (96, 100, 100, 100),
    ],
)
def test_chunks_end_where_states_are_saved(start: int, end: int, known: int, expected: int) -> None:
    assert manager().chunk_end(start, end, known) == expected
    assert manager(caching=False).chunk_end(start, end, known) == end


def test_a_state_is_saved_and_restored() -> None:
    kv = manager()
    first = new(kv, 19)
    assert admit(kv, first) == 0
    assert kv.take_state_copies() == ([], [])
    compute(kv, first, 0, 16, step=1)
    kv.emit_saves(2)
    saves, restores = kv.take_state_copies()
    (save,) = saves
    assert restores == [] and save.source == first.tables[1][0] != save.target and save.group == 1
    compute(kv, first, 16, 19, step=2)

    second = new(kv, 30)
    assert admit(kv, second) == 4
    assert kv.take_state_copies() == ([], [StateCopy(1, save.target, second.tables[1][0])])
    assert second.shared_step == 2, "the batch that saves may still fail"
    check(kv, [first, second])
    kv.confirm(2)
    third = new(kv, 17)
    assert admit(kv, third) == 4 and third.shared_step == 0
    kv.take_state_copies()
    for blocks in (first, second, third):
        kv.free(blocks)
    check(kv, [])


def test_blocks_without_a_saved_state_are_computed_again() -> None:
    kv = manager()
    first = new(kv, 19)
    admit(kv, first)
    compute(kv, first, 0, 19, step=1)  # ends at no border
    kv.emit_saves(2)
    kv.take_state_copies()
    assert admit(kv, new(kv, 30)) == 0


def test_the_last_saved_state_within_the_prefix_is_used() -> None:
    kv = manager(slots=8)
    first = new(kv, 71)
    admit(kv, first)
    for step, (start, end) in enumerate([(0, 32), (32, 64), (64, 68)], 1):
        compute(kv, first, start, end, step)
        kv.emit_saves(step + 1)
        kv.take_state_copies()
    assert admit(kv, new(kv, 80)) == 17
    assert admit(kv, new(kv, 67)) == 16
    assert admit(kv, new(kv, 64)) == 8


def test_a_sequence_that_generates_saves_its_state_at_intervals() -> None:
    kv = manager()
    blocks = new(kv, 40)
    admit(kv, blocks)
    assert kv.extend(blocks, 0, 40) is not None
    kv.cache(blocks, 36, 1)
    kv.save_decode_state(blocks, 36)
    kv.emit_saves(2)
    assert kv.take_state_copies() == ([], [])
    kv.save_decode_state(blocks, 32)
    kv.emit_saves(2)
    saves, _ = kv.take_state_copies()
    assert len(saves) == 1


def test_without_a_free_slot_nothing_is_saved_and_nothing_is_continued() -> None:
    kv = manager(slots=1)
    first = new(kv, 19)
    admit(kv, first)
    compute(kv, first, 0, 16, step=1)
    kv.emit_saves(2)
    assert kv.take_state_copies() == ([], [])
    compute(kv, first, 16, 19, step=2)
    kv.free(first)
    kv.emit_saves(3)
    # The only slot may hold a saved state; a request that took it would have none to continue from.
    assert admit(kv, new(kv, 30)) == 0


def test_the_state_of_a_request_that_has_ended_is_not_saved() -> None:
    """A KV tier may fill its slot before the next batch."""
    kv = manager(slots=1)
    first = new(kv, 19)
    admit(kv, first)
    compute(kv, first, 0, 16, step=1)
    kv.free(first)
    kv.begin_iteration()
    kv.emit_saves(2)
    assert kv.take_state_copies() == ([], [])
    assert kv.pools[1].num_cached == 0
    check(kv, [])


def test_a_failed_step_leaves_no_saved_state() -> None:
    kv = manager()
    first = new(kv, 40)
    admit(kv, first)
    compute(kv, first, 0, 32, step=1)
    kv.emit_saves(2)
    kv.take_state_copies()
    compute(kv, first, 32, 36, step=2)
    kv.uncache_unconfirmed()
    kv.emit_saves(3)
    assert kv.take_state_copies() == ([], [])
    assert kv.pools[1].num_cached == 0
    check(kv, [first])


def test_saved_states_in_copies_are_not_evicted() -> None:
    kv = manager(slots=2)
    first = new(kv, 19)
    admit(kv, first)
    compute(kv, first, 0, 16, step=1)
    kv.emit_saves(2)
    assert kv.pools[1].num_free == 0, "the target is in use until the batch is sent"
    kv.take_state_copies()
    assert kv.pools[1].num_free == 1


def test_a_state_that_is_being_saved_is_not_overwritten_before() -> None:
    """A KV tier may fill any free slot between two batches, so the source of a copy is not free."""
    kv = manager()
    blocks = new(kv, 40)
    admit(kv, blocks)
    compute(kv, blocks, 0, 32, 1)
    kv.emit_saves(2)
    (source,) = blocks.tables[1]
    kv.free(blocks)
    check(kv, [])
    taken = kv.pools[1].allocate(kv.pools[1].num_free)
    assert source not in taken
    (save,), _ = kv.take_state_copies()
    assert save.source == source
    kv.pools[1].free(taken)
    assert kv.pools[1].num_free == kv.pools[1].num_blocks


def test_a_state_of_a_request_that_has_ended_is_not_saved() -> None:
    kv = manager()
    blocks = new(kv, 40)
    admit(kv, blocks)
    compute(kv, blocks, 0, 32, 1)
    kv.free(blocks)
    kv.emit_saves(2)
    assert kv.take_state_copies() == ([], []) and kv.num_used == 0
