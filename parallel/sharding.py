"""Who holds what: contiguous shares of dimensions, heads and vocabulary."""

from dataclasses import dataclass


def split(total: int, parts: int, rank: int) -> tuple[int, int]:
    """(start, size) of the share of `rank` among `parts` as even ones as there can be.

    The first total % parts shares are one longer.
    """
    share, extra = divmod(total, parts)
    return rank * share + min(rank, extra), share + (rank < extra)


@dataclass(frozen=True)
class HeadShard:
    """One rank's attention heads; key/value heads may be shared with other ranks."""

    q_start: int
    q_count: int
    kv_start: int
    kv_count: int


def head_shard(num_heads: int, num_kv_heads: int, tp: int, rank: int) -> HeadShard:
    """The heads of `rank` among `tp` ranks.

    With a key/value head for every rank, whole groups are dealt out, as evenly as they go: 9
    query and 3 key/value heads over 2 ranks give 6 with 2 and 3 with 1. With fewer, each
    key/value head is held by several ranks, which share its query heads evenly.
    Raises ValueError when the heads cannot be dealt out so.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} key/value heads")
    group = num_heads // num_kv_heads
    if num_kv_heads >= tp:
        kv_start, kv_count = split(num_kv_heads, tp, rank)
        return HeadShard(kv_start * group, kv_count * group, kv_start, kv_count)
    sharers, uneven = divmod(tp, num_kv_heads)
    if uneven or sharers > group:
        raise ValueError(
            f"tensor_parallel_size {tp} does not fit {num_heads} query and {num_kv_heads} "
            f"key/value heads: it must be at most {num_kv_heads}, or a multiple of it up to {num_heads}"
        )
    kv_start, member = divmod(rank, sharers)
    start, count = split(group, sharers, member)
    return HeadShard(kv_start * group + start, count, kv_start, 1)
