"""Inputs of a decode step: one program for a chunk of a row's block table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling.decode_inputs import DecodeInputs, decode_inputs
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_BLOCK = 1024


@triton.jit
def _gather_rows(
    rows_ptr, ids_ptr, positions_ptr, table_ptr,
    ids_out, positions_out, slots_out, contexts_out, table_out, drawn_out,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    last = tl.load(positions_ptr + row)
    table = table_ptr + row * WIDTH
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    blocks = tl.load(table + entry, mask=entry < (last + BLOCK_SIZE) // BLOCK_SIZE, other=0)
    tl.store(table_out + index * WIDTH + entry, blocks, mask=entry < WIDTH)
    if tl.program_id(1) == 0:
        position = tl.maximum(last, 0)
        slot = tl.load(table + position // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(ids_out + index, tl.load(ids_ptr + row))
        tl.store(positions_out + index, position)
        tl.store(slots_out + index, tl.where(last < 0, -1, slot))
        tl.store(contexts_out + index, (last + 1).to(tl.int32))
        tl.store(drawn_out + index, tl.where(last < 0, -1, last + 1))


@decode_inputs.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda rows_R, ids_N, positions_N, table_NW, block_size: table_NW.is_contiguous(),
)
def _launch(
    rows_R: Tensor, ids_N: Tensor, positions_N: Tensor, table_NW: Tensor, block_size: int
) -> DecodeInputs:
    rows = len(rows_R)
    width = table_NW.shape[1]
    ids_R, positions_R, slots_R, drawn_R = (torch.empty_like(rows_R) for _ in range(4))
    contexts_R = torch.empty_like(rows_R, dtype=torch.int32)
    table_RW = table_NW.new_empty(rows, width)
    block = min(triton.next_power_of_2(width), _BLOCK)
    if rows:
        _gather_rows[(rows, triton.cdiv(width, block))](
            rows_R, ids_N, positions_N, table_NW,
            ids_R, positions_R, slots_R, contexts_R, table_RW, drawn_R,
            WIDTH=width, BLOCK_SIZE=block_size, BLOCK=block,
        )  # fmt: skip
    return DecodeInputs(ids_R, positions_R, slots_R, contexts_R, table_RW, drawn_R)
