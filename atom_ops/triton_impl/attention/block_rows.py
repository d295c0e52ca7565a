"""Blocks of all layers to rows and back: one launch of few programs, which leave the device to a step."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.block_rows import BlockTensors, gather_block_rows, scatter_block_rows
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_PROGRAMS = 32
"""They copy ten times as fast as a link to the host, on a quarter of an H200's multiprocessors or less."""
_UNITS = 2048
_ALIGNED_BYTES = 16


# The kernel has one specialization: it runs in threads that must not compile while a step is captured.
@triton.jit(
    do_not_specialize=["count", "tensors", "row_units"],
    do_not_specialize_on_alignment=["places_ptr", "blocks_ptr", "rows_ptr"],
)
def _copy_rows(
    places_ptr, blocks_ptr, rows_ptr, count, tensors, row_units,
    TO_ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    rows_ptr = tl.multiple_of(rows_ptr, 16)
    for item in range(tl.program_id(0), count * tensors, tl.num_programs(0)):
        row = item // tensors
        place = places_ptr + item % tensors * 3
        width = tl.load(place + 1)
        block = tl.load(blocks_ptr + row)
        of_block = tl.load(place).to(tl.pointer_type(tl.int64)) + block * width
        of_row = rows_ptr + row.to(tl.int64) * row_units + tl.load(place + 2)
        of_block = tl.multiple_of(of_block, 16)
        of_row = tl.multiple_of(of_row, 16)
        for start in range(0, width, UNITS):
            unit = start + tl.arange(0, UNITS)
            inside = unit < width
            if TO_ROWS:
                tl.store(of_row + unit, tl.load(of_block + unit, mask=inside), mask=inside)
            else:
                tl.store(of_block + unit, tl.load(of_row + unit, mask=inside), mask=inside)


def _supports(blocks: BlockTensors, blocks_N: Tensor, rows_NU: Tensor) -> bool:
    """Units of eight bytes, of which all blocks and rows have pairs."""
    return (
        rows_NU.dtype == torch.int64
        and rows_NU.is_contiguous()
        and rows_NU.data_ptr() % _ALIGNED_BYTES == 0
        and all(
            tensor.shape[1] % 2 == 0 and tensor.data_ptr() % _ALIGNED_BYTES == 0 for tensor in blocks.tensors
        )
    )


@gather_block_rows.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _gather(blocks: BlockTensors, blocks_N: Tensor, rows_NU: Tensor) -> None:
    _launch(blocks, blocks_N, rows_NU, to_rows=True)


@scatter_block_rows.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _scatter(blocks: BlockTensors, blocks_N: Tensor, rows_NU: Tensor) -> None:
    _launch(blocks, blocks_N, rows_NU, to_rows=False)


def _launch(blocks: BlockTensors, blocks_N: Tensor, rows_NU: Tensor, to_rows: bool) -> None:
    count, tensors = len(blocks_N), len(blocks.tensors)
    # Without blocks it is launched as well: that loads the kernel.
    grid = (max(1, min(_PROGRAMS, count * tensors)),)
    _copy_rows[grid](
        blocks.places_L3, blocks_N, rows_NU, count, tensors, rows_NU.shape[1], TO_ROWS=to_rows, UNITS=_UNITS
    )
