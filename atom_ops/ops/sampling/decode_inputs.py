"""The inputs of a decode step, from the row state on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import EXACT


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One token of each of R rows. A padding row has a context of 0 tokens."""

    ids_R: Tensor
    """int64."""
    positions_R: Tensor
    """int64; 0 for padding."""
    slots_R: Tensor
    """int64: the tokens' slots in the KV cache; -1 for padding."""
    contexts_R: Tensor
    """int32: context length of each row, this token included."""
    table_RW: Tensor
    """int32: the rows' block table; 0 after the context."""
    sampled_positions_R: Tensor
    """int64: positions of the tokens sampled by this step; -1 for padding."""


def _case(rows: int, entries: int, block_size: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        stored = rows + 7
        positions_N = torch.randint(0, entries * block_size, (stored,), generator=generator)
        positions_N[-1] = -1
        rows_R = torch.randperm(stored, generator=generator)[:rows]
        rows_R[rows // 2 :] = torch.where(rows_R[rows // 2 :] % 2 == 0, stored - 1, rows_R[rows // 2 :])
        ids_N = torch.randint(0, 5000, (stored,), generator=generator)
        table_NW = torch.randint(0, 99, (stored, entries), generator=generator, dtype=torch.int32)
        return rows_R, ids_N, positions_N, table_NW, block_size

    return Case(f"{rows}x{entries}x{block_size}", make)


@op([_case(1, 3, 4), _case(17, 40, 16), _case(5, 3000, 16)], EXACT)
def decode_inputs(
    rows_R: Tensor, ids_N: Tensor, positions_N: Tensor, table_NW: Tensor, block_size: int
) -> DecodeInputs:
    """The inputs of rows `rows_R` (int64), indices into the state of N rows on the device.

    The last sampled id of row n is `ids_N[n]` (int64), its position `positions_N[n]` (int64; -1
    for padding rows), its block table `table_NW[n]` (int32).
    """
    last_R = positions_N[rows_R]
    positions_R = last_R.clamp(min=0)
    padding_R = last_R < 0
    table_RW = table_NW[rows_R]
    block_R = table_RW.gather(1, (positions_R // block_size)[:, None])[:, 0].long()
    slots_R = (block_R * block_size + positions_R % block_size).masked_fill(padding_R, -1)
    needed_R = (last_R + block_size) // block_size
    behind_RW = torch.arange(table_NW.shape[1], device=rows_R.device) >= needed_R[:, None]
    return DecodeInputs(
        ids_N[rows_R],
        positions_R,
        slots_R,
        (last_R + 1).int(),
        table_RW.masked_fill(behind_RW, 0),
        (last_R + 1).masked_fill(padding_R, -1),
    )
