from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.kv_cache.block_pool import BlockPool


def check(pool: BlockPool, users: dict[int, int]) -> None:
    for _ in pool.check_integrity([users.get(block, 0) for block in range(pool.num_blocks)]):
        pass


def test_every_block_is_allocated_once() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate(2) + pool.allocate(1)) == [0, 1, 2]
    with pytest.raises(IndexError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)
    check(pool, {0: 1, 1: 1, 2: 1})


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_the_cached_block_released_first_is_reused_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.cache(block, b"digest%d" % block, b"hash_input%d" % block, step=0)
    for block in reversed(blocks):
        pool.free([block])
    assert [pool.allocate(1)[0] for _ in blocks] == blocks[::-1]


def test_a_block_of_unknown_content_is_reused_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached, unknown = pool.allocate(2)
    pool.cache(cached, b"d", b"c", step=0)
    pool.free([cached])
    pool.free([unknown])
    assert pool.allocate(1) == [unknown]
    assert pool.find(b"d", b"c") == cached


def test_a_free_block_is_found_until_it_is_allocated() -> None:
    pool = BlockPool(1)
    block = pool.allocate(1)[0]
    pool.cache(block, b"d", b"c", step=0)
    pool.free([block])
    assert pool.find(b"d", b"c") == block
    pool.allocate(1)
    assert pool.find(b"d", b"c") is None


def test_a_shared_block_is_free_when_its_last_user_frees_it() -> None:
    pool = BlockPool(2)
    block = pool.allocate(1)[0]
    pool.share([block])
    pool.free([block])
    assert pool._ref_counts[block] and pool.num_free == 1
    pool.free([block])
    assert not pool._ref_counts[block] and pool.num_free == 2


def test_sharing_removes_a_free_block_from_the_middle_of_the_lru_list() -> None:
    pool = BlockPool(5)
    for block in pool.allocate(5):
        pool.cache(block, b"digest%d" % block, b"content", step=0)
        pool.free([block])
    pool.share([2])
    check(pool, {2: 1})
    assert 2 not in pool.allocate(4)


def test_a_hit_needs_equal_content_not_just_an_equal_digest() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.cache(first, b"d", b"hash_input", step=0)
    assert pool.find(b"d", b"other") is None
    assert not pool.cache(second, b"d", b"other", step=0)
    assert pool.cache(second, b"d", b"hash_input", step=0)
    assert pool.find(b"d", b"hash_input") == first


@pytest.mark.parametrize("damage", ["ref_counts", "stack", "lost", "evictable", "digest"])
def test_the_integrity_check_finds_damage(damage: str) -> None:
    pool = BlockPool(4)
    block = pool.allocate(1)[0]
    pool.cache(block, b"d", b"c", step=0)
    check(pool, {block: 1})
    if damage == "ref_counts":
        pool._ref_counts[block] = 2
    elif damage == "stack":
        pool._uncached[0] = block
    elif damage == "lost":
        pool._uncached.pop()
    elif damage == "evictable":
        pool._evictable[block] = None
    else:
        pool._digests[block] = b"x"
    with pytest.raises(AssertionError):
        check(pool, {block: 1})


@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "share", "free", "cache"]), st.integers(0, 40)), max_size=60
    )
)
@settings(max_examples=100, deadline=None)
def test_any_sequence_of_operations_is_consistent(steps: list[tuple[str, int]]) -> None:
    pool, users = BlockPool(6), Counter[int]()
    for kind, number in steps:
        held = sorted(users)
        if kind == "allocate" and number % 4 <= pool.num_free:
            users.update(pool.allocate(number % 4))
        elif kind == "share":
            found = pool.find(b"%d" % (number % 5), b"")
            if found is not None:
                pool.share([found])
                users[found] += 1
        elif kind == "free" and held:
            pool.free([held[number % len(held)]])
            users.subtract([held[number % len(held)]])
        elif kind == "cache" and held and pool._digests[held[number % len(held)]] is None:
            pool.cache(held[number % len(held)], b"%d" % (number % 5), b"", step=0)
        users = +users
        check(pool, users)
