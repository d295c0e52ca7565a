"""Token embedding: one program for a block of a row."""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.elementwise.embedding import embedding
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_BLOCK = 1024


# Ids may be a slice of a larger upload: their alignment changes and must not cause a recompilation.
@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _gather(
    ids_ptr, weight_ptr, out_ptr, first_id,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # In this order: no later kernel starts before the step's inputs are complete.
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    row = tl.load(ids_ptr + token).to(tl.int64) - first_id
    held = (row >= 0) & (row < ROWS)
    found = tl.load(weight_ptr + row * SIZE + column, mask=inside & held, other=0.0)
    tl.store(out_ptr + token * SIZE + column, found, mask=inside)


@embedding.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda ids_T, weight_VD, first_id: weight_VD.is_contiguous() and ids_T.is_contiguous(),
)
def _launch(ids_T: Tensor, weight_VD: Tensor, first_id: int) -> Tensor:
    rows, size = weight_VD.shape
    out_TD = weight_VD.new_empty((*ids_T.shape, size))
    if out_TD.numel():
        block = min(triton.next_power_of_2(size), _BLOCK)
        grid = (ids_T.numel(), triton.cdiv(size, block))
        _gather[grid](
            ids_T, weight_VD, out_TD, first_id,
            ROWS=rows, SIZE=size, BLOCK=block, num_warps=4, **launch_options(ids_T.device),
        )  # fmt: skip
    return out_TD
