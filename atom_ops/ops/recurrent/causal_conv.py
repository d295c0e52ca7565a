"""A short causal convolution along each row's tokens, with state carried between steps."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.ops.recurrent.recurrent_state import StatePlan, plan_states


def state_rows(
    lens: list[int], fresh: list[int], generator: torch.Generator, moves: bool = False
) -> tuple[StatePlan, int]:
    """For test cases: a plan of rows of `lens` tokens, rows `fresh` new; and the number of slots.

    With `moves` the rows start from other slots than their own.
    """
    rows = len(lens)
    slots = torch.randperm(2 * rows + 2, generator=generator)
    is_fresh = np.isin(np.arange(rows), fresh)
    plan = plan_states(np.array(lens, np.int32), slots[:rows].numpy(), is_fresh, torch.device("cpu"))
    if moves:
        plan = replace(plan, sources_R=slots[rows : 2 * rows])
    return plan, len(slots)


def _case(lens: list[int], fresh: list[int], channels: int, taps: int, moves: bool = False) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        plan, slots = state_rows(lens, fresh, generator, moves)
        x = torch.randn(sum(lens), channels + 16, generator=generator).to(dtype)[:, 8:-8]
        weight = torch.randn(channels, taps, generator=generator).to(dtype)
        return x, weight, torch.randn(slots, taps - 1, channels, generator=generator).to(dtype), plan

    return Case(f"{channels}x{taps}-{lens}new{fresh}{'moves' * moves}".replace(" ", ""), make)


@op(
    [
        _case([1, 1, 1, 1], [2], 96, 4),
        _case([5, 1, 2, 1, 70, 3], [0, 2, 5], 96, 4),
        _case([1], [], 200, 2),
        _case([33, 4], [0], 40, 3),
        _case([1, 1, 1], [1], 96, 4, moves=True),
    ]
)
def causal_conv(x_TC: Tensor, weight_CW: Tensor, conv_SWC: Tensor, plan: StatePlan) -> Tensor:
    """silu of each channel's weighted sum over a token and the W - 1 before it in its row, [T, C].

    Inputs of earlier steps are read from the rows' slots (zeros for a fresh row), which then get the
    last W - 1 inputs. Only the last dimension of `x_TC` must be contiguous. Sums are in float32.
    """
    taps = weight_CW.shape[1]
    rows = torch.arange(len(plan.slots_R), device=x_TC.device)
    before = taps - 1
    # All rows concatenated, each after its state s:  s s s 0 1 2 3 | s s s 0 | …
    along = x_TC.new_empty(len(x_TC) + len(rows) * before, x_TC.shape[1])
    place_T = torch.arange(len(x_TC), device=x_TC.device) + (plan.row_T + 1) * before
    starts_R1 = plan.query_starts_R1.long()
    state_RB = torch.arange(before, device=x_TC.device) + rows[:, None] * before
    along.index_copy_(0, (starts_R1[:-1, None] + state_RB).flatten(), plan.read(conv_SWC, rows).flatten(0, 1))
    along.index_copy_(0, place_T, x_TC)
    total_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    for tap, weight_C in enumerate(weight_CW.float().unbind(1)):
        total_TC.addcmul_(along.index_select(0, place_T - before + tap).float(), weight_C)
    last = along.index_select(0, (starts_R1[1:, None] + state_RB).flatten())
    plan.write(conv_SWC, rows, last.unflatten(0, (len(rows), before)))
    return functional.silu(total_TC).to(x_TC.dtype)
