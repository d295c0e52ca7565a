"""How much KV a request can need, and how a memory budget becomes block counts."""

from collections.abc import Sequence

from atom.messages.worker import FullAttentionSpec, KVSpec, SlidingWindowSpec


def first_visible_block(spec: KVSpec, position: int) -> int:
    """Index of the first block that a token at `position` attends to.

    A window counts the token itself: position p sees p - window + 1 .. p.
    """
    if isinstance(spec, FullAttentionSpec):
        return 0
    return max(0, position - spec.window + 1) // spec.block_size


def peak_blocks(spec: KVSpec, num_tokens: int, max_chunk: int) -> int:
    """Most blocks that one sequence of `num_tokens` holds at a time, computed in steps of `max_chunk`."""
    whole = _ceil_div(num_tokens, spec.block_size)
    if isinstance(spec, FullAttentionSpec):
        return whole
    return min(whole, _window_peak(spec, max_chunk))


def plan_blocks(
    specs: Sequence[KVSpec],
    kv_bytes: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> list[int]:
    """Blocks for each group so that together they fill at most `kv_bytes`.

    All groups get the same number, except that a window group stops at what `max_num_seqs`
    requests can use. A budget below one block of each group gives zeros.
    """
    limits = [_most_useful(spec, max_num_seqs, max_num_batched_tokens, max_model_len) for spec in specs]

    def counts(blocks: int) -> list[int]:
        return [blocks if limit is None else min(blocks, limit) for limit in limits]

    def size(blocks: int) -> int:
        return sum(n * spec.bytes_per_block for n, spec in zip(counts(blocks), specs, strict=True))

    low, high = 0, kv_bytes // min(spec.bytes_per_block for spec in specs)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= kv_bytes else (low, middle - 1)
    return counts(low)


def longest_sequence(specs: Sequence[KVSpec], num_blocks: Sequence[int], max_chunk: int) -> int | None:
    """Tokens of the longest sequence that the blocks can hold; None when any length fits."""
    lengths = [
        blocks * spec.block_size
        for spec, blocks in zip(specs, num_blocks, strict=True)
        if isinstance(spec, FullAttentionSpec) or _window_peak(spec, max_chunk) > blocks
    ]
    return min(lengths, default=None)


def cache_tokens(specs: Sequence[KVSpec], num_blocks: Sequence[int]) -> int:
    """Tokens whose whole context the cache holds: the groups without a window decide, where there are any."""
    pairs = list(zip(specs, num_blocks, strict=True))
    full = [pair for pair in pairs if isinstance(pair[0], FullAttentionSpec)]
    return min(blocks * spec.block_size for spec, blocks in full or pairs)


def _most_useful(
    spec: KVSpec, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> int | None:
    """Blocks beyond this would never hold a visible token; None without a window."""
    if isinstance(spec, FullAttentionSpec):
        return None
    resting = _ceil_div(spec.window, spec.block_size) + 2  # window, and a block begun at either end
    each = min(resting, _ceil_div(max_model_len, spec.block_size))
    return max_num_seqs * each + _ceil_div(max_num_batched_tokens, spec.block_size)


def _window_peak(spec: SlidingWindowSpec, max_chunk: int) -> int:
    """Blocks that a window and one chunk behind it touch, wherever in a block they begin."""
    span = spec.window - 1 + max_chunk
    return _ceil_div(span - 1, spec.block_size) + 1


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)
