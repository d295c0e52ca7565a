"""Philox4x32-10, the counter-based random number generator of Salmon et al. (SC11).

Counter and key give the same four words on every platform: 32-bit words are held in int64 tensors
and no multiplication overflows.
"""

from functools import cache

import torch
from torch import Tensor

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Multipliers and key steps, [2, 1] each; cached, because the copy synchronises with the device."""
    columns = torch.tensor([_MULTIPLIERS, _KEY_STEPS], device=device)[:, :, None]
    return columns[0], columns[1]


def philox(counter_4R: Tensor, key_2R: Tensor) -> Tensor:
    """Four random words for each column, [4, R]; all words are 0 … 2**32 - 1 in int64."""
    multiplier, key_step = _constants(counter_4R.device)
    upper, lower = multiplier >> 16, multiplier & 0xFFFF
    rounds = torch.arange(_ROUNDS, device=counter_4R.device)[:, None, None]
    keys = (key_2R + rounds * key_step) & _WORD
    even, odd = counter_4R[0::2], counter_4R[1::2]
    for key in keys:
        # 32 x 32 -> 64 bits, by two multiplications of at most 48 bits.
        low = even * lower
        high = even * upper + (low >> 16)
        product_high = high >> 16
        product_low = ((high & 0xFFFF) << 16) | (low & 0xFFFF)
        even, odd = product_high.flip(0) ^ odd ^ key, product_low.flip(0)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seed_R: Tensor, sequence_R: Tensor, position_R: Tensor, purpose: int) -> Tensor:
    """One uniform number in [0, 1) for each row: a multiple of 2**-24, float64.

    `seed_R` holds the bits of unsigned 64-bit seeds.
    """
    key = torch.stack((seed_R & _WORD, (seed_R >> 32) & _WORD))
    counter = torch.stack(
        (
            position_R & _WORD,
            torch.full_like(position_R, purpose),
            sequence_R & _WORD,
            torch.zeros_like(position_R),
        )
    )
    return (philox(counter, key)[0] >> 8).double() * 2.0**-24
