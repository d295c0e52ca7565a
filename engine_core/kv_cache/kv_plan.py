"""How much KV a request can need, and how a memory budget becomes block counts."""

import operator
from collections.abc import Sequence

from atom.shared.messages.worker import (
    FullAttentionSpec,
    KVSpec,
    PagedSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    stored_bytes,
)

_STATE_SHARE = 2
"""States take at most this fraction (1/n) of the memory: requests need blocks, too."""


def unit_bytes(spec: KVSpec) -> int:
    """Bytes of one block, or of one slot."""
    return spec.bytes_per_slot if isinstance(spec, RecurrentStateSpec) else spec.bytes_per_block


def first_visible_block(spec: PagedSpec, position: int) -> int:
    """Index of the first block that a token at `position` attends to.

    A window counts the token itself: position p sees p - window + 1 .. p.
    """
    if isinstance(spec, FullAttentionSpec):
        return 0
    return max(0, position - spec.window + 1) // spec.block_size


def covering_blocks(spec: KVSpec, num_tokens: int) -> int:
    """Length of the table of a sequence of `num_tokens` >= 1, with placeholders."""
    return 1 if isinstance(spec, RecurrentStateSpec) else _ceil_div(num_tokens, spec.block_size)


def peak_blocks(spec: KVSpec, num_tokens: int, max_chunk: int) -> int:
    """Most blocks in use at a time by a sequence of `num_tokens`, computed in chunks of `max_chunk`."""
    all_blocks = covering_blocks(spec, num_tokens)
    if isinstance(spec, SlidingWindowSpec):
        return min(all_blocks, _window_peak(spec, max_chunk))
    return all_blocks


def plan_blocks(
    specs: Sequence[KVSpec],
    kv_bytes: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    max_uncertain: int = 0,
    state_interval: int = 0,
) -> list[int]:
    """Blocks for each group so that together they fill at most `kv_bytes`.

    All groups get the same number, but a window group no more than `max_num_seqs` requests can use.
    Groups of states come first, with a slot for each of these requests or as many as half of the
    memory holds; with a `state_interval`, there are two more for that many tokens in blocks, to save states
    for the prefix cache. A budget below one block of each group gives zeros. A decoding request uses up to
    `max_uncertain` tokens more, for drafts.
    """
    states = sum(spec.bytes_per_slot for spec in specs if isinstance(spec, RecurrentStateSpec))
    slots = _num_slots(states, kv_bytes, max_num_seqs) if states else 0
    paged = [spec for spec in specs if not isinstance(spec, RecurrentStateSpec)]
    if states and state_interval:
        token_bytes = sum(spec.bytes_per_block / spec.block_size for spec in paged)
        slots += _num_saved(states, kv_bytes, slots, state_interval * token_bytes)
    limits = [
        _max_useful_blocks(spec, max_num_seqs, max_num_batched_tokens, max_model_len, max_uncertain)
        for spec in paged
    ]
    blocks = iter(_plan_paged(paged, kv_bytes - slots * states, limits))
    return [slots if isinstance(spec, RecurrentStateSpec) else next(blocks) for spec in specs]


def _num_slots(bytes_of_one: int, kv_bytes: int, max_num_seqs: int) -> int:
    """At least one slot if it fits at all, even if it takes more than that fraction."""
    return min(max_num_seqs, max(kv_bytes // _STATE_SHARE // bytes_of_one, 1), kv_bytes // bytes_of_one)


def _num_saved(bytes_of_one: int, kv_bytes: int, slots: int, interval_bytes: float) -> int:
    """Slots for saved states, besides those of running requests; all slots take at most the share of states.

    An interval has two states: one at its end, and one at the end of a prompt.
    """
    left = kv_bytes - slots * bytes_of_one
    wanted = 2 * left / (2 * bytes_of_one + interval_bytes)
    return max(0, min(int(wanted), kv_bytes // _STATE_SHARE // bytes_of_one - slots))


def _plan_paged(specs: Sequence[PagedSpec], kv_bytes: int, limits: Sequence[int | None]) -> list[int]:
    """`limits`: the most blocks that each group can use; None for any number."""

    def counts(blocks: int) -> list[int]:
        return [blocks if limit is None else min(blocks, limit) for limit in limits]

    def size(blocks: int) -> int:
        return sum(n * spec.bytes_per_block for n, spec in zip(counts(blocks), specs, strict=True))

    low = 0
    high = kv_bytes // min(spec.bytes_per_block for spec in specs)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= kv_bytes else (low, middle - 1)
    return counts(low)


def plan_slots(
    specs: Sequence[KVSpec], num_blocks: Sequence[int], tier_bytes: int, extra_bytes: int = 0, unit: int = 1
) -> list[int]:
    """Slots of each group in a tier of so many bytes, in the proportion of the cache's `num_blocks`.

    A slot takes `extra_bytes` more than what it keeps of a block, and whole units.
    """
    sizes = [_ceil_div(stored_bytes(spec) + extra_bytes, unit) * unit for spec in specs]
    total = sum(map(operator.mul, sizes, num_blocks))
    return [blocks * tier_bytes // total for blocks in num_blocks]


def longest_sequence(specs: Sequence[KVSpec], num_blocks: Sequence[int], max_chunk: int) -> int | None:
    """Tokens of the longest sequence that the blocks can hold; None when any length fits."""
    lengths = [
        blocks * spec.block_size
        for spec, blocks in _paged(specs, num_blocks)
        if _limits_length(spec, blocks, max_chunk)
    ]
    return min(lengths, default=None)


def cache_tokens(specs: Sequence[KVSpec], num_blocks: Sequence[int]) -> int:
    """Tokens that fit the cache with their whole context; window groups count only if there are no others."""
    pairs = _paged(specs, num_blocks)
    full = [pair for pair in pairs if isinstance(pair[0], FullAttentionSpec)]
    return min(blocks * spec.block_size for spec, blocks in full or pairs)


def _max_useful_blocks(
    spec: PagedSpec, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, max_uncertain: int
) -> int | None:
    """Blocks that can hold visible tokens; None without a window."""
    if isinstance(spec, FullAttentionSpec):
        return None
    window = _ceil_div(spec.window + max_uncertain, spec.block_size) + 2  # with a partial block at each end
    each = min(window, _ceil_div(max_model_len, spec.block_size))
    return max_num_seqs * each + _ceil_div(max_num_batched_tokens, spec.block_size)


def _paged(specs: Sequence[KVSpec], num_blocks: Sequence[int]) -> list[tuple[PagedSpec, int]]:
    pairs = zip(specs, num_blocks, strict=True)
    return [(spec, blocks) for spec, blocks in pairs if not isinstance(spec, RecurrentStateSpec)]


def _limits_length(spec: PagedSpec, blocks: int, max_chunk: int) -> bool:
    return isinstance(spec, FullAttentionSpec) or _window_peak(spec, max_chunk) > blocks


def _window_peak(spec: SlidingWindowSpec, max_chunk: int) -> int:
    """Most blocks of a window and the chunk after it, at any offset in a block."""
    span = spec.window - 1 + max_chunk
    return _ceil_div(span - 1, spec.block_size) + 1


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)
