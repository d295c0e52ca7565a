"""How long a prefix is of which every KV group has what a later token needs."""

from collections.abc import Callable, Sequence

from atom.shared.messages.worker import SlidingWindowSpec
from engine_core.kv_cache.kv_plan import first_visible_block

__all__ = ["Has", "visible_prefix"]

Has = Callable[[int, bytes, bytes], bool]
"""Whether the block of a KV group with this digest and hash input can be used."""


def visible_prefix(
    windows: Sequence[tuple[int, SlidingWindowSpec]],
    digests: Sequence[bytes],
    hash_inputs: Sequence[bytes],
    length: int,
    has: Has,
) -> int:
    """The greatest number of blocks, up to `length`, whose last window every group of `windows` has.

    Each group's blocks are looked up once, from the last one backwards.
    """
    has_from = [length] * len(windows)  # the group has blocks has_from .. length - 1
    changed = True
    while changed:
        changed = False
        for number, (group, spec) in enumerate(windows):
            needed = first_visible_block(spec, length * spec.block_size)
            index = min(has_from[number], length)
            while index > needed and has(group, digests[index - 1], hash_inputs[index - 1]):
                index -= 1
            has_from[number] = index
            if index > needed:
                length = has_from[number] = index - 1
                changed = True
    return length
