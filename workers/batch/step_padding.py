"""Padding of an eager step: tokens without a KV slot, in rows without tokens and context."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from atom_ops import StatePlan
from workers.batch.step_inputs import StepInputs
from workers.batch.step_shape import StepShape
from workers.layers.context import GroupContext


def pad_step(step: StepInputs, shape: StepShape) -> StepInputs:
    """The step's inputs padded to the shape's tokens and rows; the same object if it needs no padding.

    Padding tokens have id 0 and position 0. They come after the step's own tokens, so its sampling rows stay
    valid.
    """
    tokens = shape.padded_tokens
    rows = shape.padded_rows
    if tokens == len(step.ids_T) and rows == num_rows(step.groups):
        return step
    return replace(
        step,
        ids_T=_extended(step.ids_T, tokens, 0),
        positions_T=_extended(step.positions_T, tokens, 0),
        groups=pad_groups(step.groups, tokens, rows),
        rope=None if step.rope is None else _extended(step.rope, tokens, 0),
    )


def pad_groups(
    groups: Sequence[GroupContext | StatePlan], tokens: int, rows: int
) -> list[GroupContext | StatePlan]:
    """Groups of a step padded to `tokens` tokens and `rows` rows."""
    return [_padded(group, tokens, rows) for group in groups]


def num_rows(groups: Sequence[GroupContext | StatePlan]) -> int:
    """Rows of a step."""
    group = groups[0]
    return len(group.slots_R if isinstance(group, StatePlan) else group.plan.context_lens_R)


def _padded(group: GroupContext | StatePlan, tokens: int, rows: int) -> GroupContext | StatePlan:
    if isinstance(group, StatePlan):
        return group.padded(tokens, rows)
    return GroupContext(_extended(group.slots_T, tokens, -1), group.plan.padded(tokens, rows))


def _extended(column_T: torch.Tensor, tokens: int, value: int) -> torch.Tensor:
    return functional.pad(column_T, (0, tokens - column_T.shape[-1]), value=value)
