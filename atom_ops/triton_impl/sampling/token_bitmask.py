"""Masks of ids: a program for a part of a row."""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling.token_bitmask import WORD_BITS, apply_token_bitmask
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_BLOCK = 4096


@triton.jit
def _mask(
    logits_ptr, rows_ptr, mask_ptr, vocabulary, words,
    WORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows_ptr + index)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    in_vocabulary = ids < vocabulary
    word = tl.load(mask_ptr + index * words + ids // WORD, mask=in_vocabulary, other=0)
    excluded = ((word >> (ids % WORD)) & 1) == 0
    tl.store(logits_ptr + row * vocabulary + ids, float("-inf"), mask=in_vocabulary & excluded)


@apply_token_bitmask.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda logits_UV, rows_G, mask_GW: logits_UV.is_contiguous() and mask_GW.is_contiguous(),
)
def _launch(logits_UV: Tensor, rows_G: Tensor, mask_GW: Tensor) -> None:
    rows, words = mask_GW.shape
    vocabulary = logits_UV.shape[1]
    if rows:
        grid = rows, triton.cdiv(vocabulary, _BLOCK)
        _mask[grid](logits_UV, rows_G, mask_GW, vocabulary, words, WORD=WORD_BITS, BLOCK=_BLOCK)
