"""Masks of the ids that rows may sample, one bit for each id.

G of the U rows have a mask, of W words with 32 ids each.
"""

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import EXACT

WORD_BITS = 32


def _case(rows: int, vocabulary: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.randn(rows + 1, vocabulary, generator=generator)
        words = -(-vocabulary // WORD_BITS)
        masks = torch.randint(-(1 << 31), 1 << 31, (rows, words), generator=generator).int()
        return logits, torch.arange(rows).flip(0) + 1, masks

    return Case(f"{rows}x{vocabulary}", make)


@op([_case(1, 32), _case(5, 50), _case(17, 5001)], EXACT)
def apply_token_bitmask(logits_UV: Tensor, rows_G: Tensor, mask_GW: Tensor) -> None:
    """Set the float32 logits of the ids that the rows may not sample to minus infinity, in place.

    Row `rows_G[g]` (int64, each row once) may sample id i if bit i % 32 of word i // 32 of mask g (int32)
    is 1.
    """
    bytes_GB = mask_GW.view(torch.uint8)  # little-endian: the bits of the ids in order
    bits = torch.arange(8, dtype=torch.uint8, device=mask_GW.device)
    allowed_GV = ((bytes_GB[:, :, None] >> bits) & 1).flatten(1)[:, : logits_UV.shape[1]].bool()
    kept_GV = logits_UV.index_select(0, rows_G).masked_fill_(~allowed_GV, -torch.inf)
    logits_UV.index_copy_(0, rows_G, kept_GV)
