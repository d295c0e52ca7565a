"""Philox4x32-7, the counter-based random number generator of Salmon et al. (SC11), and sampling noise.

Seven rounds are the fewest of which the paper shows that they pass BigCrush.

Counter and key give the same four words on every platform. 32-bit words are held in int64 tensors or
uint64 arrays, whose products wrap modulo 2**64.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import EXACT

ROUNDS = 7
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
LANES = 4
"""Tokens of one counter."""
_BLOCKS_AT_ONCE = 1024
"""Counters of which numpy computes the words together: few enough for the cache, and many for its calls."""

Words = TypeVar("Words", bound=Any)  # int64 Tensor or uint64 array


def philox(counter: Iterable[Words], key: Iterable[Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words for each counter (4 words) and key (2 words), which broadcast.

    Words are 0 … 2**32 - 1. A counter word that is constant in a dimension has size 1 there: the
    first three rounds then multiply fewer words.
    """
    first, second, third, fourth = counter
    low_key, high_key = key
    for step in range(ROUNDS):
        low, high = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first = _mixed(high, second, low_key + step * _KEY_STEPS[0])
        third = _mixed(low, fourth, high_key + step * _KEY_STEPS[1])
        second, fourth = high, low  # `_mixed` clears the upper halves
    return first, second & _WORD, third, fourth & _WORD


def _mixed(product: Words, word: Words, key: Words) -> Words:
    """Upper half of `product` ^ lower half of `word` ^ lower half of `key`."""
    upper: Words = product >> 32
    if upper.shape == word.shape:
        upper ^= word  # in place, because new memory costs more than the operation
    else:
        upper = upper ^ word
    upper ^= key
    upper &= _WORD
    return upper


def token_words(
    seed_R: Words, sequence_R: Words, position_R: Words, block: Words, purpose: int
) -> tuple[Words, Words, Words, Words]:
    """The words of tokens 4 * block … 4 * block + 3, [R, N] each; `block` is [N] or [R, N].

    The key is the seed, the counter is the position, the purpose, the sequence and the block.
    """
    key = (seed_R & _WORD)[:, None], ((seed_R >> 32) & _WORD)[:, None]
    position_R1 = (position_R & _WORD)[:, None]
    sequence_R1 = (sequence_R & _WORD)[:, None]
    return philox((position_R1, position_R1 * 0 + purpose, sequence_R1, block), key)


def _words_case(rows: int, width: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor | int, ...]:
        columns = torch.randint(-(1 << 62), 1 << 62, (3, rows), generator=generator)
        needed_RW = torch.ones(rows, width, dtype=torch.bool)
        return *columns, 3, needed_RW, torch.empty(rows, width)

    return Case(f"{rows}x{width}", make)


@op([_words_case(1, 4), _words_case(3, 1_300), _words_case(2, 20_480)], EXACT)
def store_words(
    seed_R: Tensor,
    sequence_R: Tensor,
    position_R: Tensor,
    purpose: int,
    needed_RW: Tensor,
    out_RW: Tensor,
) -> Tensor:
    """The words of the tokens 0 … W - 1 as float32, in `out_RW`; W is a multiple of 4.

    Tokens that are not needed (bool) may get 0. On a CPU numpy computes some rows at a time, so
    that the words stay in the cache. Python threads do not make it faster: the operations are too short.
    """
    rows = len(out_RW)
    blocks = out_RW.shape[1] // LANES
    if out_RW.device.type != "cpu":
        every = torch.arange(blocks, device=out_RW.device)
        lanes = token_words(seed_R, sequence_R, position_R, every, purpose)
        return out_RW.copy_(torch.stack(lanes, -1).flatten(1))
    columns = [column.numpy().view(np.uint64) for column in (seed_R, sequence_R, position_R)]
    every_N = np.arange(blocks, dtype=np.uint64)
    out = out_RW.numpy().reshape(rows, blocks, LANES)
    needed_RN = needed_RW.numpy().view(np.uint32)  # the four flags of a block are one number

    at_once = max(1, _BLOCKS_AT_ONCE // blocks)
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        seed, sequence, position = (column[part] for column in columns)
        # Scattered stores are slow: they pay off for fewer than half of the blocks of one row.
        few = at_once == 1 and np.count_nonzero(needed_RN[part]) < blocks // 2
        which = np.flatnonzero(needed_RN[first]) if few else slice(None)
        words = token_words(seed, sequence, position, every_N[which], purpose)
        if few:
            out[part] = 0
        for lane, word in enumerate(words):
            out[part, which, lane] = word
    return out_RW


def uniform_(words: Tensor) -> Tensor:
    """In place: words as float32 to uniform numbers in (0, 1), with a resolution of 2**-32 at 0.

    Every operation is exact or rounded to nearest, so that all devices get the same bits.
    """
    return words.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)


def exponential_(words: Tensor) -> Tensor:
    """In place: words as float32 to exponential variates, -log(1 - u).

    The bits of u are the same on all devices, the logarithm may differ by some ulps. -log of the
    result is Gumbel noise.
    """
    return uniform_(words).neg_().log1p_().neg_()
