"""CUDA graphs of decode steps, captured for some batch sizes.

    forward   rows -> inputs of their next tokens -> model -> hidden states
    sample    hidden states -> logits -> ids, which are the rows' next inputs

A step of R rows replays the graphs of the next captured size S >= R; rows R to S are padding.
The host writes only the row indices, when they change, and new blocks. Sampling has its own graphs
because logits processors and log probabilities are not captured.

R rows of a captured size, S tokens: one of each row, or with speculation 1 + K of each; D hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import numpy as np
import torch

from atom_ops import (
    AttentionPlan,
    DecodeInputs,
    SamplingBatch,
    StatePlan,
    decode_inputs,
    draft_inputs,
    sample,
)
from atom_ops.op import REFERENCE
from workers.batch.draft_states import captured_draft_states
from workers.batch.group_rows import Rows
from workers.batch.input_batch import InputBatch
from workers.batch.state_slots import StateSlots
from workers.batch.step_inputs import UniformDecode
from workers.graphs.graph_recorder import Recorder, Replay
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext, GroupContext
from workers.spec_decode.draft_rows import Computed, DraftRows, Draws, Verified
from workers.spec_decode.speculation import Speculation


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

    computed: Computed
    """The pass of the captured size."""
    hidden_SD: torch.Tensor
    positions_S: torch.Tensor
    """Positions of the tokens to sample."""
    drafts_RK: torch.Tensor | None = None
    """The verified drafts; None without speculation."""

    def first(self, rows: int) -> "ForwardOutput":
        """The output of the first rows."""
        drafts_RK = None if self.drafts_RK is None else self.drafts_RK[:rows]
        tokens = rows if drafts_RK is None else rows + drafts_RK.numel()
        return ForwardOutput(self.computed, self.hidden_SD[:tokens], self.positions_S[:tokens], drafts_RK)

    def draft_rows(self, batch: UniformDecode) -> DraftRows | None:
        """The drafts of a batch's rows, which this is the output of."""
        if self.drafts_RK is None:
            return None
        return self._draft_rows(batch.rows, batch.rows_R, self.drafts_RK)

    def captured_rows(self, rows_R: torch.Tensor) -> DraftRows:
        """The drafts of a captured size's rows, of which the host knows nothing."""
        assert self.drafts_RK is not None
        return self._draft_rows(np.zeros(len(rows_R), np.int64), rows_R, self.drafts_RK)

    def _draft_rows(self, rows: Rows, rows_R: torch.Tensor, drafts_RK: torch.Tensor) -> DraftRows:
        width = 1 + drafts_RK.shape[1]
        return DraftRows(
            rows,
            np.ones(len(rows), np.bool_),
            rows_R,
            self.positions_S.view(-1, width)[:, 0],
            drafts_RK,
            np.arange(len(rows)).repeat(width),
            np.tile(np.arange(width), len(rows)),
            None,
        )


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Output of a captured sampler."""

    ids_S: torch.Tensor
    counts_R: torch.Tensor | None = None
    """With speculation: see `Verified`."""
    proposed_R: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _SizeGraphs:
    """The graphs of one captured size."""

    rows_R: torch.Tensor
    forward: Replay
    output: ForwardOutput
    samplers: dict[SamplingKind, tuple[Replay, _Sampled]]


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
        num_drafts: int | None = None,
    ):
        """`sizes` are ascending, at most the rows of `inputs`; `num_drafts` of each row, None: the most."""
        self._model = model
        self._kv_layers = kv_layers
        self._inputs = inputs
        self._sizes = list(sizes)
        self._record = record
        self._num_drafts = inputs.limits.num_drafts if num_drafts is None else num_drafts
        self._device_tables = [table.device_table(device) for table in inputs.tables]
        self._starts = torch.arange(self._sizes[-1] + 1, dtype=torch.int32, device=device)
        self._starts *= self.tokens_per_row
        self._settings_S = _blank_settings(self._sizes[-1] * self.tokens_per_row, device)
        self._graphs: dict[int, _SizeGraphs] = {}
        self._size = 0
        self._uniform: UniformDecode | None = None
        self._settings: SamplingBatch | None = None

    @torch.inference_mode()
    def capture(self, progress: Callable[[], None]) -> None:
        """Capture every size, the largest first: smaller ones reuse its memory.

        Raises NoHostRowsError if a model that drafts on the host cannot follow captured steps.
        """
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture_size(size)
            progress()
        speculation = self._inputs.speculation
        if speculation is not None and speculation.exact:
            speculation.observe(self._graphs[self._sizes[-1]].output.computed)

    @property
    def sizes(self) -> list[int]:
        """Rows of the captured steps, ascending."""
        return self._sizes

    @property
    def tokens_per_row(self) -> int:
        """Tokens of each row: 1, or with speculation 1 + drafts."""
        return 1 + self._num_drafts

    def forward(self, uniform: UniformDecode, size: int) -> ForwardOutput:
        """Launch the forward pass of each row's next tokens, padded to `size` rows, a captured size."""
        for table in self._inputs.tables:
            table.update_device_table()
        rows = len(uniform.row_list)
        if uniform is not self._uniform or size != self._size:
            self._uniform = uniform
            self._size = size
            self._settings = None
            rows_R = self._graphs[size].rows_R
            # Graphs read the rows from here. Those after the batch's are the padding row, which has no
            # position, so that it writes no KV.
            rows_R.fill_(self._inputs.limits.padding_row)
            rows_R[:rows].copy_(uniform.rows_R)
        graphs = self._graphs[size]
        graphs.forward()
        return graphs.output.first(rows)

    def dummy(self, size: int) -> torch.Tensor:
        """Launch the forward pass of `size` padding rows, which writes nothing; returns hidden states."""
        self._uniform = None
        graphs = self._graphs[size]
        graphs.rows_R.fill_(self._inputs.limits.padding_row)
        graphs.forward()
        return graphs.output.hidden_SD

    def can_sample(self, settings: SamplingBatch) -> bool:
        """Whether a captured sampler supports these settings; does not wait for the device."""
        return SamplingKind.of(settings) in self._sampling_kinds

    @property
    def _sampling_kinds(self) -> list[SamplingKind]:
        """Kinds that can be captured: torch's own sampler depends on which rows are random or truncated.

        A sampler includes the next drafts. Ranks may have to agree, in each step, on the passes they take.
        """
        speculation = self._inputs.speculation
        if speculation is not None and not speculation.exact and speculation.passes is not None:
            return []
        return list(SamplingKind) if sample.order[0] != REFERENCE else [SamplingKind.GREEDY]

    def sample(self, settings: SamplingBatch) -> tuple[torch.Tensor, Verified | None]:
        """Launch sampling for the last forward pass; returns ids, int64 [S], valid until the next.

        With speculation also what was verified, unless the host does that. Copies `settings` only if they are
        another object than in the last step.
        """
        assert self._uniform is not None, "forward comes first"
        if settings is not self._settings:
            self._settings = settings
            if settings.any_random:
                _copy_columns(settings, self._settings_S)
        replay, sampled = self._graphs[self._size].samplers[SamplingKind.of(settings)]
        replay()
        rows = len(self._uniform.row_list)
        ids_S = sampled.ids_S[: rows * self.tokens_per_row]
        if sampled.counts_R is None or sampled.proposed_R is None:
            return ids_S, None
        return ids_S, Verified(sampled.counts_R[:rows], sampled.proposed_R[:rows], ids_S)

    def _capture_size(self, size: int) -> _SizeGraphs:
        rows_R = torch.full_like(self._starts[:size], self._inputs.limits.padding_row, dtype=torch.int64)
        name = f"bs_{size}" if not self._num_drafts else f"bs_{size}x{self.tokens_per_row}"
        forward, output = self._record(partial(self._forward, rows_R), name)
        if self._record.runs_first:
            # Capturing computes nothing, but recording a sampler runs it once. Without this replay it would
            # store uninitialised memory as the padding row's position, and a padding row with a position
            # writes to block 0.
            forward()
        samplers = {}
        for kind in self._sampling_kinds:
            body = partial(self._sample, rows_R, output, kind)
            samplers[kind] = self._record(body, f"{name}_sample_{kind.name.lower()}")
        return _SizeGraphs(rows_R, forward, output, samplers)

    def _forward(self, rows_R: torch.Tensor) -> ForwardOutput:
        limits = self._inputs.limits
        state = self._inputs.device_rows
        groups: list[GroupContext | StatePlan] = []
        inputs: DecodeInputs | None = None
        if self._inputs.speculation is not None:
            return self._forward_drafts(rows_R, self._inputs.speculation)
        for table, device_table in zip(self._inputs.tables, self._device_tables, strict=True):
            if isinstance(table, StateSlots):
                groups.append(self._state_plan(device_table.index_select(0, rows_R)))
                continue
            inputs = decode_inputs(rows_R, state.ids_N, state.positions_N, device_table, limits.block_size)
            plan = self._attention_plan(inputs.table_RW, inputs.contexts_R)
            groups.append(GroupContext(inputs.slots_R, plan))
        assert inputs is not None, "every model has a group of blocks"
        computed = self._compute(rows_R, inputs.ids_R, inputs.positions_R, groups)
        return ForwardOutput(computed, computed.hidden_TD, inputs.sampled_positions_R)

    def _compute(
        self,
        rows_R: torch.Tensor,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        groups: list[GroupContext | StatePlan],
    ) -> Computed:
        context = ForwardContext(self._kv_layers, groups)
        images = self._inputs.images
        rope_T = positions_T if images is None else images.positions(positions_T, rows_R)
        hidden_TD = self._model(ids_T, rope_T, context)
        return Computed(ids_T, positions_T, hidden_TD, context, rope_T=rope_T)

    def _forward_drafts(self, rows_R: torch.Tensor, speculation: Speculation) -> ForwardOutput:
        block_size = self._inputs.limits.block_size
        per_group = []
        groups: list[GroupContext | StatePlan] = []
        for table, device_table in zip(self._inputs.tables, self._device_tables, strict=True):
            if isinstance(table, StateSlots):
                assert table.accepted_N is not None, "it is tracked with drafts"
                slots_R = device_table.index_select(0, rows_R)
                accepted_R = table.accepted_N.index_select(0, rows_R)
                starts_R1 = torch.arange(len(rows_R) + 1, dtype=torch.int32, device=rows_R.device)
                groups.append(
                    captured_draft_states(slots_R, accepted_R, table.places, self.tokens_per_row, starts_R1)
                )
                continue
            inputs = draft_inputs(rows_R, speculation.state, device_table, block_size, self._num_drafts)
            per_group.append(inputs)
            plan = self._attention_plan(inputs.table_RW, inputs.contexts_R)
            groups.append(GroupContext(inputs.slots_T, plan))
        inputs = per_group[0]
        speculation.add_tokens(inputs.ids_T, groups)
        computed = self._compute(rows_R, inputs.ids_T, inputs.positions_T, groups)
        return ForwardOutput(computed, computed.hidden_TD, inputs.sampled_positions_T, inputs.drafts_RK)

    def _attention_plan(self, table_RW: torch.Tensor, contexts_R: torch.Tensor) -> AttentionPlan:
        size = len(contexts_R)
        return AttentionPlan(
            table_RW,
            contexts_R,
            self._starts[: size + 1],
            num_tokens=size * self.tokens_per_row,
            min_query_len=self.tokens_per_row,
            max_query_len=self.tokens_per_row,
            max_context_len=self._inputs.limits.max_context,
            split_tokens=self._inputs.split_tokens,
            decode_query_len=self.tokens_per_row,
        )

    def _state_plan(self, slots_R: torch.Tensor) -> StatePlan:
        """No row is fresh: a decode is never the first token of a sequence."""
        size = len(slots_R)
        none_R = torch.zeros_like(slots_R, dtype=torch.bool)
        return StatePlan(slots_R, none_R, self._starts[: size + 1], num_tokens=size, max_query_len=1)

    def _sample(self, rows_R: torch.Tensor, output: ForwardOutput, kind: SamplingKind) -> _Sampled:
        settings = _first(self._settings_S, len(output.hidden_SD), kind)
        ids_S = self._model.sample(output.hidden_SD, settings, output.positions_S)
        speculation = self._inputs.speculation
        if speculation is None:
            self._inputs.device_rows.store(rows_R, ids_S, output.positions_S)
            return _Sampled(ids_S)
        if speculation.exact:
            return _Sampled(ids_S)
        of_rows = None
        if speculation.runs_model:
            of_rows = _first(self._settings_S, len(ids_S), kind, every=self.tokens_per_row)
        tokens_S = torch.arange(len(ids_S), device=ids_S.device)
        draws = Draws(output.computed, ids_S, tokens_S, of_rows)
        verified = speculation.verify(output.captured_rows(rows_R), draws)
        return _Sampled(verified.ids_S, verified.counts_R, verified.proposed_R)


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


def _first(settings: SamplingBatch, tokens: int, kind: SamplingKind, every: int = 1) -> SamplingBatch:
    """The settings of the first tokens, or of one in `every` of them."""
    columns = {name: getattr(settings, name)[:tokens:every].contiguous() for name in _COLUMNS}
    truncated = kind is SamplingKind.TRUNCATED
    return replace(
        settings,
        **columns,
        any_random=kind is not SamplingKind.GREEDY,
        any_top_k=truncated,
        any_top_p=truncated,
        any_min_p=truncated,
    )
