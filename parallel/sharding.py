"""Contiguous shards of dimensions, attention heads and the vocabulary."""

from dataclasses import dataclass

from atom.shared.config.tensor_parallel import heads_fit


def split(total: int, parts: int, rank: int) -> tuple[int, int]:
    """(start, size) of the shard of `rank` when `total` is split into `parts`.

    The first total % parts shards are one longer.
    """
    size, extra = divmod(total, parts)
    return rank * size + min(rank, extra), size + (rank < extra)


@dataclass(frozen=True)
class HeadShard:
    """The attention heads of one rank; key/value heads may be replicated on other ranks."""

    q_start: int
    q_count: int
    kv_start: int
    kv_count: int


def head_shard(num_heads: int, num_kv_heads: int, tp: int, rank: int) -> HeadShard:
    """The heads of `rank` among `tp` ranks.

    With at least `tp` key/value heads, whole groups are split as evenly as possible: 9 query and 3
    key/value heads over 2 ranks give 6 with 2 and 3 with 1. With fewer, each key/value head is
    replicated on several ranks, which split its query heads evenly.
    Raises ValueError if the heads cannot be split this way.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
    group = num_heads // num_kv_heads
    if num_kv_heads >= tp:
        kv_start, kv_count = split(num_kv_heads, tp, rank)
        return HeadShard(kv_start * group, kv_count * group, kv_start, kv_count)
    if not heads_fit(tp, num_heads, num_kv_heads):
        raise ValueError(
            f"--tensor-parallel-size {tp} does not fit {num_heads} query and {num_kv_heads} "
            f"key/value heads: it must be at most {num_kv_heads}, or a multiple of it up to {num_heads}"
        )
    replicas = tp // num_kv_heads
    kv_start, replica = divmod(rank, replicas)
    start, count = split(group, replicas, replica)
    return HeadShard(kv_start * group + start, count, kv_start, 1)
