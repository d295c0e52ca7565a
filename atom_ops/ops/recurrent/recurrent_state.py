"""The state of recurrent layers: one slot per request, whatever its length.

    conv        [S, W - 1, C]      the convolution's last inputs, oldest first; compute dtype
    recurrent   [S, N, E, F]       float32, a matrix for each value head: key by value features

S slots, W taps of the convolution, C channels, N value heads.

`StatePlan` maps the rows of a step to slots, on the device; the rows' tokens are concatenated, as
in an `AttentionPlan`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from atom_ops.ops.attention.kv_cache import without_padding_rows, zeros
from atom_ops.transfer import to_device


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One layer's states."""

    conv: Tensor
    recurrent: Tensor


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of one slot of one layer."""

    channels: int
    taps: int
    """Taps of the convolution; its state holds taps - 1 inputs."""
    heads: int
    key_features: int
    value_features: int
    dtype: torch.dtype
    """dtype of the convolution's inputs."""

    @property
    def bytes(self) -> int:
        conv = (self.taps - 1) * self.channels * self.dtype.itemsize
        return conv + self.heads * self.key_features * self.value_features * torch.float32.itemsize


def make_state_layer(num_slots: int, shape: StateShape, device: torch.device) -> StateLayer:
    """Slots that no request has used."""
    heads = shape.heads, shape.key_features, shape.value_features
    return StateLayer(
        zeros((num_slots, shape.taps - 1, shape.channels), shape.dtype, device),
        zeros((num_slots, *heads), torch.float32, device),
    )


@dataclass(frozen=True)
class StatePlan:
    """The states that R rows read and write in one step.

    Row r's tokens are `query_starts_R1[r]` … `query_starts_R1[r + 1]` - 1 of the step. A padding row
    has slot -1: it reads and writes no state, and its results are undefined, as are those of tokens
    after the last row's. So a captured graph can be replayed with fewer rows, as long as the
    numbers below still bound the tensors' values.
    """

    slots_R: Tensor
    """int64."""
    fresh_R: Tensor
    """bool: the row starts a sequence: its state is zero, whatever its slot holds."""
    query_starts_R1: Tensor
    """int32."""
    num_tokens: int
    max_query_len: int
    query_lens: NDArray[np.int32] | None = None
    """On the host, if known; 0 for padding rows."""
    parts: "Sequence[StatePart] | None" = None
    """The tokens that are computed one part after another; None: all together."""
    sources_R: Tensor | None = None
    """int64: the slots of the states that rows of one token each start from; None: the rows' own slots."""

    @property
    def starts_from_R(self) -> Tensor:
        """int64: the slot of the state that each row starts from; -1 for padding."""
        return self.slots_R if self.sources_R is None else self.sources_R

    def by_part(self, compute: Callable[..., Tensor], *inputs_T: Tensor) -> Tensor:
        """`compute(plan, *inputs_T)` [T, …]; where there are parts, of one after another."""
        if self.parts is None:
            return compute(self, *inputs_T)
        found = None
        for part in self.parts:
            of_part = compute(part.plan, *(each.index_select(0, part.tokens_P) for each in inputs_T))
            if found is None:
                found = of_part.new_zeros(len(inputs_T[0]), *of_part.shape[1:])
            found.index_copy_(0, part.tokens_P, of_part)
        assert found is not None, "a plan has no empty list of parts"
        return found

    @cached_property
    def row_T(self) -> Tensor:
        """int64: the row of each token; padding tokens count as the last row's."""
        tokens = torch.arange(self.num_tokens, device=self.slots_R.device)
        rows = torch.searchsorted(self.query_starts_R1[1:].long(), tokens, right=True)
        return rows.clamp_(max=len(self.slots_R) - 1)

    def groups(self) -> Iterator[tuple[Tensor, int]]:
        """Rows to compute together (int64), and the most tokens of one of them.

        Rows of one token form a group of their own if the host knows the lengths.
        """
        if self.query_lens is None:
            yield torch.arange(len(self.slots_R), device=self.slots_R.device), self.max_query_len
            return
        for rows in (np.flatnonzero(self.query_lens == 1), np.flatnonzero(self.query_lens > 1)):
            if len(rows):
                yield to_device(rows, self.slots_R.device), int(self.query_lens[rows].max())

    def read(self, states: Tensor, rows: Tensor) -> Tensor:
        """The states that these rows start from, out of `states` [S, …]."""
        found = states.index_select(0, self.starts_from_R.index_select(0, rows).clamp(min=0))
        fresh = self.fresh_R.index_select(0, rows).view(-1, *[1] * (states.dim() - 1))
        return found.masked_fill(fresh, 0.0)

    def write(self, states: Tensor, rows: Tensor, new: Tensor) -> None:
        """Store the rows' new states."""
        slots = self.slots_R.index_select(0, rows)
        if self._may_pad:
            slots, new = without_padding_rows(states, slots, new)
        states.index_copy_(0, slots, new.to(states.dtype))

    def padded(self, num_tokens: int, num_rows: int) -> "StatePlan":
        """The plan of the same rows, then padding rows; `num_tokens` and `num_rows` count both."""
        more = num_rows - len(self.slots_R)
        return StatePlan(
            slots_R=functional.pad(self.slots_R, (0, more), value=-1),
            fresh_R=functional.pad(self.fresh_R, (0, more), value=0),
            query_starts_R1=functional.pad(self.query_starts_R1, (0, more), value=self.num_tokens),
            num_tokens=num_tokens,
            max_query_len=self.max_query_len,
            query_lens=None if self.query_lens is None else np.pad(self.query_lens, (0, more)),
            parts=self.parts,
            sources_R=None if self.sources_R is None else functional.pad(self.sources_R, (0, more), value=-1),
        )

    @cached_property
    def _may_pad(self) -> bool:
        return self.query_lens is None or not self.query_lens.all()


@dataclass(frozen=True, slots=True)
class StatePart:
    """P tokens of a step, of R rows."""

    tokens_P: Tensor
    """int64: indices among the step's tokens."""
    plan: StatePlan


def starts_alike(plan: StatePlan) -> bool:
    """Whether rows start from their own slots, or have one token each; kernels know no other plans."""
    return plan.sources_R is None or plan.max_query_len == 1


def plan_states(
    query_lens: NDArray[np.int32], slots: NDArray[np.int64], fresh: NDArray[np.bool_], device: torch.device
) -> StatePlan:
    """The plan of one step from host arrays: row i has `query_lens[i]` new tokens (at least 1)."""
    starts = np.zeros(len(query_lens) + 1, np.int64)
    query_lens.cumsum(out=starts[1:])
    packed = to_device(np.concatenate((slots, fresh, starts)).astype(np.int64, copy=False), device)
    slots_R, fresh_R, starts_R1 = packed.split([len(slots), len(fresh), len(starts)])
    return StatePlan(
        slots_R=slots_R,
        fresh_R=fresh_R.bool(),
        query_starts_R1=starts_R1.int(),
        num_tokens=int(starts[-1]),
        max_query_len=int(query_lens.max()),
        query_lens=query_lens,
    )


def empty_states(device: torch.device) -> StatePlan:
    """The plan of a step without rows; pad it before use."""
    return StatePlan(
        slots_R=torch.empty(0, dtype=torch.int64, device=device),
        fresh_R=torch.empty(0, dtype=torch.bool, device=device),
        query_starts_R1=torch.zeros(1, dtype=torch.int32, device=device),
        num_tokens=0,
        max_query_len=1,
        query_lens=np.empty(0, np.int32),
    )
