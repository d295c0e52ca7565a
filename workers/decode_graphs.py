"""Decode steps as graphs: captured once for some numbers of rows, replayed for every step.

    forward   rows -> inputs of their next tokens -> model -> hidden states
    draw      hidden states -> logits -> ids, which are the rows' next inputs

A step of R rows runs the graphs of the next captured size S >= R; the rows between are padding.
The host writes nothing but the rows' indices, when these change, and new blocks. SamplingKind is apart
because a step may need more than a graph can hold: logit rules, log probabilities.

S rows of a captured size, R of them real, D hidden.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import numpy as np
import torch

from atom_ops import AttentionPlan, DecodeInputs, SamplingBatch, StatePlan, decode_inputs, sample
from atom_ops.op import REFERENCE
from workers.graph_recorder import Recorder, Replay
from workers.input_batch import DecodeBatch, InputBatch
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext, GroupContext
from workers.state_slots import StateSlots


class SamplingKind(Enum):
    """What a captured draw can do: each asks for the ones before it too."""

    GREEDY = 0
    FREE = 1
    LIMITED = 2

    @classmethod
    def of(cls, settings: SamplingBatch) -> "SamplingKind":
        if not settings.any_random:
            return cls.GREEDY
        limited = settings.any_top_k or settings.any_top_p or settings.any_min_p
        return cls.LIMITED if limited else cls.FREE


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a captured forward pass leaves, until the next one."""

    hidden_RD: torch.Tensor
    positions_R: torch.Tensor
    """Where the drawn tokens will stand."""


@dataclass(frozen=True, slots=True)
class _Graphs:
    """Of one size."""

    rows_S: torch.Tensor
    forward: Replay
    forwarded: Forwarded
    """S rows."""
    draws: dict[SamplingKind, tuple[Replay, torch.Tensor]]
    """How to draw, and where the ids are then."""


class DecodeGraphs:
    """The graphs of one model; `capture` first, then for each step `forward` and perhaps `draw`."""

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[CacheLayer],
        inputs: InputBatch,
        sizes: Sequence[int],
        record: Recorder,
        device: torch.device,
    ):
        """`sizes` rise, and are no more than `inputs` has rows."""
        self._model = model
        self._kv_layers = kv_layers
        self._inputs = inputs
        self._sizes = list(sizes)
        self._record = record
        self._mirrors = [table.mirror(device) for table in inputs.tables]
        self._starts = torch.arange(self._sizes[-1] + 1, dtype=torch.int32, device=device)
        self._settings_S = _blank_settings(self._sizes[-1], device)
        self._graphs: dict[int, _Graphs] = {}
        self._size = 0
        self._decode_batch: DecodeBatch | None = None
        self._settings: SamplingBatch | None = None

    @torch.inference_mode()
    def capture(self, progress: Callable[[], None]) -> None:
        """Capture every size, the largest first: the smaller ones fit into the memory it took."""
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture_size(size)
            progress()

    def fit(self, decode_batch: DecodeBatch) -> bool:
        """Whether a captured size holds so many rows."""
        return len(decode_batch.names) <= self._sizes[-1]

    def forward(self, decode_batch: DecodeBatch) -> Forwarded:
        """Launch the forward pass of the rows' next tokens."""
        for table in self._inputs.tables:
            table.refresh()
        rows = len(decode_batch.names)
        if decode_batch is not self._decode_batch:
            self._decode_batch, self._settings = decode_batch, None
            self._size = self._sizes[bisect_left(self._sizes, rows)]
            rows_S = self._graphs[self._size].rows_S
            rows_S.fill_(self._inputs.limits.padding_row)
            rows_S[:rows].copy_(decode_batch.rows_R)
        graphs = self._graphs[self._size]
        graphs.forward()
        return Forwarded(graphs.forwarded.hidden_RD[:rows], graphs.forwarded.positions_R[:rows])

    def can_sample(self, settings: SamplingBatch) -> bool:
        """Whether a captured draw serves these rows; never asks the device."""
        return SamplingKind.of(settings) in _sampling_kinds()

    def draw(self, settings: SamplingBatch) -> torch.Tensor:
        """Launch the draws of the rows just forwarded, and keep their ids; int64 [R].

        Passing the same `settings` again saves copying them.
        """
        assert self._decode_batch is not None, "forward comes first"
        if settings is not self._settings:
            self._settings = settings
            if settings.any_random:
                _copy_columns(settings, self._settings_S)
        replay, ids_S = self._graphs[self._size].draws[SamplingKind.of(settings)]
        replay()
        return ids_S[: len(self._decode_batch.names)]

    def _capture_size(self, size: int) -> _Graphs:
        rows_S = torch.full_like(self._starts[:size], self._inputs.limits.padding_row, dtype=torch.int64)
        forward, forwarded = self._record(partial(self._forward, rows_S), f"bs_{size}")
        # Capturing computes nothing. The draws below run once, and would keep whatever lies in that
        # memory as the padding's position: padding with a position is a row, which writes to block 0.
        forward()
        draws = {}
        for drawing in _sampling_kinds():
            draw = partial(self._draw, rows_S, forwarded, drawing)
            draws[drawing] = self._record(draw, f"bs_{size}_draw_{drawing.name.lower()}")
        return _Graphs(rows_S, forward, forwarded, draws)

    def _forward(self, rows_S: torch.Tensor) -> Forwarded:
        limits, state = self._inputs.limits, self._inputs.device_rows
        groups: list[GroupContext | StatePlan] = []
        inputs: DecodeInputs | None = None
        for rows, mirror in zip(self._inputs.tables, self._mirrors, strict=True):
            if isinstance(rows, StateSlots):
                groups.append(self._state_plan(mirror.index_select(0, rows_S)))
                continue
            inputs = decode_inputs(rows_S, state.ids_N, state.positions_N, mirror, limits.block_size)
            groups.append(GroupContext(inputs.slots_R, self._attention_plan(inputs)))
        assert inputs is not None, "every model has a group of blocks"
        context = ForwardContext(self._kv_layers, groups)
        return Forwarded(self._model(inputs.ids_R, inputs.positions_R, context), inputs.sampled_positions_R)

    def _attention_plan(self, inputs: DecodeInputs) -> AttentionPlan:
        size = len(inputs.contexts_R)
        return AttentionPlan(
            inputs.table_RW,
            inputs.contexts_R,
            self._starts[: size + 1],
            num_tokens=size,
            min_query_len=1,
            max_query_len=1,
            max_context_len=self._inputs.limits.max_model_len,
            split_tokens=self._inputs.split_tokens,
        )

    def _state_plan(self, slots_S: torch.Tensor) -> StatePlan:
        """Nobody's first token is a decode."""
        size = len(slots_S)
        none_S = torch.zeros_like(slots_S, dtype=torch.bool)
        return StatePlan(slots_S, none_S, self._starts[: size + 1], num_tokens=size, max_query_len=1)

    def _draw(self, rows_S: torch.Tensor, forwarded: Forwarded, drawing: SamplingKind) -> torch.Tensor:
        logits_SV = self._model.compute_logits(forwarded.hidden_RD)
        settings = _first(self._settings_S, len(rows_S), drawing)
        ids_S = sample(logits_SV, settings, forwarded.positions_R)
        self._inputs.device_rows.keep(rows_S, ids_S, forwarded.positions_R)
        return ids_S


def _sampling_kinds() -> list[SamplingKind]:
    """What can be captured: torch's own limits and random draws need to know the rows beforehand."""
    return list(SamplingKind) if sample.order[0] != REFERENCE else [SamplingKind.GREEDY]


def _blank_settings(rows: int, device: torch.device) -> SamplingBatch:
    ones = np.ones(rows, np.float32)
    return SamplingBatch.from_host(
        temperature=ones,
        top_k=np.zeros(rows, np.int64),
        top_p=ones.copy(),
        min_p=np.zeros(rows, np.float32),
        seed=np.zeros(rows, np.uint64),
        sequence=np.zeros(rows, np.int64),
        device=device,
    )


_COLUMNS = ("temperature_R", "top_k_R", "top_p_R", "min_p_R", "seed_R", "sequence_R")


def _copy_columns(source: SamplingBatch, target: SamplingBatch) -> None:
    for name in _COLUMNS:
        column = getattr(source, name)
        getattr(target, name)[: len(column)].copy_(column)


def _first(settings: SamplingBatch, rows: int, drawing: SamplingKind) -> SamplingBatch:
    columns = {name: getattr(settings, name)[:rows] for name in _COLUMNS}
    limited = drawing is SamplingKind.LIMITED
    return replace(
        settings,
        **columns,
        any_random=drawing is not SamplingKind.GREEDY,
        any_top_k=limited,
        any_top_p=limited,
        any_min_p=limited,
    )
