"""Random words for the tokens of a vocabulary."""

import torch
from torch import Tensor

from atom_ops.native_impl import NEEDS, call, runs_on
from atom_ops.ops.sampling.philox import LANES, store_words


def _supports(
    seed_R: Tensor, sequence_R: Tensor, position_R: Tensor, purpose: int, needed_RW: Tensor, out_RW: Tensor
) -> bool:
    tensors = seed_R, sequence_R, position_R, needed_RW, out_RW
    return all(each.is_contiguous() for each in tensors)


@store_words.provider("native", needs=NEEDS, supported=runs_on, supports=_supports)
def _store_words(
    seed_R: Tensor, sequence_R: Tensor, position_R: Tensor, purpose: int, needed_RW: Tensor, out_RW: Tensor
) -> Tensor:
    rows, width = out_RW.shape
    call(
        "random_words", torch.float32, seed_R, sequence_R, position_R, purpose, needed_RW, out_RW, rows,
        width // LANES,
    )  # fmt: skip
    return out_RW
