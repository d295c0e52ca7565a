"""CUDA graphs of decode steps, captured for some batch sizes.

    forward   rows -> inputs of their next tokens -> model -> hidden states
    sample    hidden states -> logits -> ids, which are the rows' next inputs

A step of R rows replays the graphs of the next captured size S >= R; rows R to S are padding.
The host writes only the row indices, when they change, and new blocks. Sampling has its own graphs
because logits processors and log probabilities are not captured.

S rows of a captured size, R of them real, D hidden.
"""

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
    """What a captured sampler supports; each kind includes the ones before it."""

    GREEDY = 0
    TEMPERATURE = 1
    TRUNCATED = 2
    """Top-k, top-p or min-p."""

    @classmethod
    def of(cls, settings: SamplingBatch) -> "SamplingKind":
        if not settings.any_random:
            return cls.GREEDY
        truncated = settings.any_top_k or settings.any_top_p or settings.any_min_p
        return cls.TRUNCATED if truncated else cls.TEMPERATURE


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Output of a captured forward pass; the next pass overwrites it."""

    hidden_RD: torch.Tensor
    positions_R: torch.Tensor
    """Positions of the tokens to sample."""


@dataclass(frozen=True, slots=True)
class _SizeGraphs:
    """The graphs of one captured size."""

    rows_S: torch.Tensor
    forward: Replay
    output: ForwardOutput
    """S rows."""
    samplers: dict[SamplingKind, tuple[Replay, torch.Tensor]]
    """Replay and sampled ids [S] of each kind."""


class DecodeGraphs:
    """The graphs of one model: `capture` once, then for each step `forward` and, if it can, `sample`."""

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[CacheLayer],
        inputs: InputBatch,
        sizes: Sequence[int],
        record: Recorder,
        device: torch.device,
    ):
        """`sizes` are ascending and at most the rows of `inputs`."""
        self._model = model
        self._kv_layers = kv_layers
        self._inputs = inputs
        self._sizes = list(sizes)
        self._record = record
        self._device_tables = [table.device_table(device) for table in inputs.tables]
        self._starts = torch.arange(self._sizes[-1] + 1, dtype=torch.int32, device=device)
        self._settings_S = _blank_settings(self._sizes[-1], device)
        self._graphs: dict[int, _SizeGraphs] = {}
        self._size = 0
        self._decode_batch: DecodeBatch | None = None
        self._settings: SamplingBatch | None = None

    @torch.inference_mode()
    def capture(self, progress: Callable[[], None]) -> None:
        """Capture every size, the largest first: smaller ones reuse its memory."""
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture_size(size)
            progress()

    @property
    def sizes(self) -> list[int]:
        """Rows of the captured steps, ascending."""
        return self._sizes

    def forward(self, decode_batch: DecodeBatch, size: int) -> ForwardOutput:
        """Launch the forward pass of each row's next token, padded to `size` rows, a captured size."""
        for table in self._inputs.tables:
            table.update_device_table()
        rows = len(decode_batch.row_list)
        if decode_batch is not self._decode_batch or size != self._size:
            self._decode_batch, self._settings, self._size = decode_batch, None, size
            rows_S = self._graphs[size].rows_S
            rows_S.fill_(self._inputs.limits.padding_row)
            rows_S[:rows].copy_(decode_batch.rows_R)
        graphs = self._graphs[size]
        graphs.forward()
        return ForwardOutput(graphs.output.hidden_RD[:rows], graphs.output.positions_R[:rows])

    def dummy(self, size: int) -> None:
        """Launch the forward pass of `size` padding rows, which writes nothing."""
        self._decode_batch = None
        graphs = self._graphs[size]
        graphs.rows_S.fill_(self._inputs.limits.padding_row)
        graphs.forward()

    def can_sample(self, settings: SamplingBatch) -> bool:
        """Whether a captured sampler supports these settings; does not wait for the device."""
        return SamplingKind.of(settings) in _sampling_kinds()

    def sample(self, settings: SamplingBatch) -> torch.Tensor:
        """Launch sampling for the last forward pass; returns ids, int64 [R], valid until the next.

        Copies `settings` only if they are another object than in the last step.
        """
        assert self._decode_batch is not None, "forward comes first"
        if settings is not self._settings:
            self._settings = settings
            if settings.any_random:
                _copy_columns(settings, self._settings_S)
        replay, ids_S = self._graphs[self._size].samplers[SamplingKind.of(settings)]
        replay()
        return ids_S[: len(self._decode_batch.row_list)]

    def _capture_size(self, size: int) -> _SizeGraphs:
        rows_S = torch.full_like(self._starts[:size], self._inputs.limits.padding_row, dtype=torch.int64)
        forward, output = self._record(partial(self._forward, rows_S), f"bs_{size}")
        # Capturing computes nothing, but recording a sampler runs it once. Without this replay it would
        # store uninitialised memory as the padding row's position, and a padding row with a position
        # writes to block 0.
        forward()
        samplers = {}
        for kind in _sampling_kinds():
            body = partial(self._sample, rows_S, output, kind)
            samplers[kind] = self._record(body, f"bs_{size}_sample_{kind.name.lower()}")
        return _SizeGraphs(rows_S, forward, output, samplers)

    def _forward(self, rows_S: torch.Tensor) -> ForwardOutput:
        limits, state = self._inputs.limits, self._inputs.device_rows
        groups: list[GroupContext | StatePlan] = []
        inputs: DecodeInputs | None = None
        for table, device_table in zip(self._inputs.tables, self._device_tables, strict=True):
            if isinstance(table, StateSlots):
                groups.append(self._state_plan(device_table.index_select(0, rows_S)))
                continue
            inputs = decode_inputs(rows_S, state.ids_N, state.positions_N, device_table, limits.block_size)
            groups.append(GroupContext(inputs.slots_R, self._attention_plan(inputs)))
        assert inputs is not None, "every model has a group of blocks"
        context = ForwardContext(self._kv_layers, groups)
        return ForwardOutput(
            self._model(inputs.ids_R, inputs.positions_R, context), inputs.sampled_positions_R
        )

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
        """No row is fresh: a decode is never the first token of a sequence."""
        size = len(slots_S)
        none_S = torch.zeros_like(slots_S, dtype=torch.bool)
        return StatePlan(slots_S, none_S, self._starts[: size + 1], num_tokens=size, max_query_len=1)

    def _sample(self, rows_S: torch.Tensor, output: ForwardOutput, kind: SamplingKind) -> torch.Tensor:
        logits_SV = self._model.compute_logits(output.hidden_RD)
        settings = _first(self._settings_S, len(rows_S), kind)
        ids_S = sample(logits_SV, settings, output.positions_R)
        self._inputs.device_rows.store(rows_S, ids_S, output.positions_R)
        return ids_S


def _sampling_kinds() -> list[SamplingKind]:
    """Kinds that can be captured: torch's own sampler depends on which rows are random or truncated."""
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


def _first(settings: SamplingBatch, rows: int, kind: SamplingKind) -> SamplingBatch:
    columns = {name: getattr(settings, name)[:rows] for name in _COLUMNS}
    truncated = kind is SamplingKind.TRUNCATED
    return replace(
        settings,
        **columns,
        any_random=kind is not SamplingKind.GREEDY,
        any_top_k=truncated,
        any_top_p=truncated,
        any_min_p=truncated,
    )
