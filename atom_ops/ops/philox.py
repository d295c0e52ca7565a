"""Philox4x32-10, the counter-based random number generator of Salmon et al. (SC11), and sampling noise.

Counter and key give the same four words on every platform: 32-bit words are held in int64 tensors
and no multiplication overflows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_ROUNDS = 10
_WORD = 0xFFFFFFFF
# The multipliers minus 2**32: below 2**30 in magnitude, so that products with words fit in int64.
_MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Iterable[Tensor], key: Iterable[Tensor]) -> Words:
    """Four random words for each counter (4 words) and key (2 words), which broadcast.

    Words are 0 … 2**32 - 1 in int64.
    """
    first, second, third, fourth = counter
    low_key, high_key = key
    for step in range(_ROUNDS):
        low, high = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        keys = [
            (word + step * add) & _WORD for word, add in zip((low_key, high_key), _KEY_STEPS, strict=True)
        ]
        first, second, third, fourth = (
            (high >> 32).add_(third).bitwise_xor_(keys[0]) ^ second,
            high.bitwise_and_(_WORD),
            (low >> 32).add_(first).bitwise_xor_(keys[1]) ^ fourth,
            low.bitwise_and_(_WORD),
        )
    return first, second, third, fourth


def token_words(seed_R: Tensor, sequence_R: Tensor, position_R: Tensor, block: Tensor, purpose: int) -> Words:
    """The words of tokens 4 * block … 4 * block + 3, [R, N] each; `block` is int64 [N] or [R, N].

    The key is the seed (int64: the bits of an unsigned 64-bit seed), the counter is the position,
    the purpose, the sequence and the block.
    """
    key = (seed_R & _WORD)[:, None], ((seed_R >> 32) & _WORD)[:, None]
    position_R1, sequence_R1 = (position_R & _WORD)[:, None], (sequence_R & _WORD)[:, None]
    return philox((position_R1, torch.full_like(position_R1, purpose), sequence_R1, block), key)


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
