"""Shares of heads and dimensions."""

import pytest

from parallel.sharding import HeadShard, head_shard, split


@pytest.mark.parametrize(("total", "parts"), [(10, 3), (1536, 2), (49152, 7), (2, 5), (0, 2)])
def test_split_covers_everything_once_and_evenly(total: int, parts: int) -> None:
    shares = [split(total, parts, rank) for rank in range(parts)]
    assert [i for start, size in shares for i in range(start, start + size)] == list(range(total))
    sizes = [size for _, size in shares]
    assert max(sizes) - min(sizes) <= 1


def test_whole_groups_are_sharded() -> None:
    assert [head_shard(9, 3, 2, rank) for rank in range(2)] == [
        HeadShard(0, 6, 0, 2),
        HeadShard(6, 3, 2, 1),
    ]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp"),
    [
        *[(9, 3, tp) for tp in (1, 2, 3, 9)],
        *[(32, 8, 4), (32, 8, 16), (16, 2, 8), (5, 5, 3), (12, 2, 8), (7, 1, 3)],
    ],
)
def test_every_query_head_is_somewhere_with_its_kv_head(heads: int, kv_heads: int, tp: int) -> None:
    shards = [head_shard(heads, kv_heads, tp, rank) for rank in range(tp)]
    heads_of_ranks = [q for shard in shards for q in range(shard.q_start, shard.q_start + shard.q_count)]
    assert heads_of_ranks == list(range(heads))
    group = heads // kv_heads
    for shard in shards:
        assert shard.q_count % shard.kv_count == 0
        for index in range(shard.q_count):
            # Query head i of a rank reads that rank's key/value head i // (local group size).
            local = index // (shard.q_count // shard.kv_count)
            assert (shard.q_start + index) // group == shard.kv_start + local


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(9, 3, 4), (8, 2, 16), (4, 4, 8)])
def test_heads_that_cannot_be_sharded(heads: int, kv_heads: int, tp: int) -> None:
    with pytest.raises(ValueError, match=f"--tensor-parallel-size {tp} does not fit {heads} query"):
        head_shard(heads, kv_heads, tp, 0)


def test_query_heads_must_be_a_multiple() -> None:
    with pytest.raises(ValueError, match="10 query heads are not a multiple of 3"):
        head_shard(10, 3, 1, 0)
