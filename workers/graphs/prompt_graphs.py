"""CUDA graphs of prefill and mixed steps, whose kernels take less time than launching them one by one.

A step of T tokens in R rows replays the graph of the next captured numbers of tokens and rows. Its
inputs are copied to the graphs' static buffers:

    tokens   0 … T - 1 | padding: no slot, no row            ids, positions, slots
    rows     0 … R - 1 | padding: no queries, no context     contexts, query starts, block tables
                                  or slot                    or slots of states

Padding tokens cost time, so many numbers of tokens are captured. A padding row costs the launch of the
programs that would compute it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from atom_ops import AttentionPlan, StatePlan
from workers.batch.block_table import BatchLimits
from workers.batch.input_batch import InputBatch
from workers.batch.state_slots import NO_SLOT, StateSlots
from workers.batch.step_inputs import StepInputs
from workers.graphs.graph_recorder import Recorder, Replay
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext, GroupContext

PROMPT_SIZES = (
    *(16, 32, 64),
    *range(128, 512, 64),
    *range(512, 1024, 128),
    *range(1024, 2048, 256),
    *range(2048, 4097, 512),
)
"""Tokens of the captured steps. With more tokens, kernels of all but tiny models outlast their launches."""

_ROW_SIZES = (16, 128)
"""Rows of the captured steps besides the most. With few, attention splits long contexts into more parts."""


class PromptGraphs:
    """The graphs of one model: `capture` once, then `forward` for every step that fits."""

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[CacheLayer],
        inputs: InputBatch,
        sizes: Sequence[int],
        record: Recorder,
        device: torch.device,
        most_rows_alone: bool = False,
    ):
        """`sizes` are numbers of tokens, ascending; `most_rows_alone`: none is captured for fewer rows."""
        limits = inputs.limits
        self._model = model
        self._kv_layers = kv_layers
        self._record = record
        self._sizes = list(sizes)
        fewer = () if most_rows_alone else _ROW_SIZES
        self._row_sizes = sorted({min(rows, limits.max_rows) for rows in (*fewer, limits.max_rows)})
        tokens = self._sizes[-1]
        rows = limits.max_rows
        self._ids_T = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._positions_T = torch.zeros_like(self._ids_T)
        self._starts_R1 = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._groups: list[_BlockBuffers | _StateBuffers] = [
            _StateBuffers(rows, self._starts_R1)
            if isinstance(table, StateSlots)
            else _BlockBuffers(tokens, limits, inputs.split_tokens, self._starts_R1)
            for table in inputs.tables
        ]
        self._graphs: dict[tuple[int, int], Replay] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[], None]) -> None:
        """Capture every size, the largest first: smaller ones reuse its memory."""
        self._hidden_TD = self._run(self._sizes[-1], self._row_sizes[-1])
        for tokens in reversed(self._sizes):
            for rows in reversed(self._row_sizes):
                forward = partial(self._capture, tokens, rows)
                self._graphs[tokens, rows], _ = self._record(forward, f"tok_{tokens}_bs_{rows}")
            progress()

    @property
    def token_sizes(self) -> list[int]:
        """Tokens of the captured steps, ascending."""
        return self._sizes

    @property
    def row_sizes(self) -> list[int]:
        """Rows of the captured steps, ascending; each is captured with every number of tokens."""
        return self._row_sizes

    def forward(self, step: StepInputs, size: int, row_size: int) -> torch.Tensor:
        """Launch the step's forward pass, padded to `size` tokens and `row_size` rows, captured sizes.

        Returns hidden states [T, D], which the next pass overwrites.
        """
        starts_R1 = _query_starts(step.groups[0])
        tokens = len(step.ids_T)
        rows = len(starts_R1) - 1
        self._ids_T[:tokens].copy_(step.ids_T)
        self._positions_T[:tokens].copy_(step.rope_positions)
        self._starts_R1[: rows + 1].copy_(starts_R1)
        for buffers, group in zip(self._groups, step.groups, strict=True):
            buffers.copy_from(group)
        self._replay(tokens, rows, size, row_size)
        return self._hidden_TD[:tokens]

    def dummy(self, size: int, row_size: int) -> torch.Tensor:
        """Launch the forward pass of padding alone, which writes nothing; returns hidden states."""
        self._replay(0, 0, size, row_size)
        return self._hidden_TD[:size]

    def _replay(self, tokens: int, rows: int, size: int, row_size: int) -> None:
        """Replay a graph whose buffers hold the inputs of `tokens` tokens and `rows` rows; pads the rest."""
        self._starts_R1[rows + 1 : row_size + 1].fill_(tokens)
        for buffers in self._groups:
            buffers.pad(tokens, rows, size, row_size)
        self._graphs[size, row_size]()

    def _capture(self, tokens: int, rows: int) -> None:
        self._hidden_TD[:tokens].copy_(self._run(tokens, rows))

    def _run(self, tokens: int, rows: int) -> torch.Tensor:
        context = ForwardContext(self._kv_layers, [buffers.context(tokens, rows) for buffers in self._groups])
        return self._model(self._ids_T[:tokens], self._positions_T[:tokens], context)


class _BlockBuffers:
    """Static inputs of one group of blocks."""

    def __init__(self, tokens: int, limits: BatchLimits, split_tokens: int, starts_R1: torch.Tensor):
        rows = limits.max_rows
        device = starts_R1.device
        self._limits = limits
        self._split_tokens = split_tokens
        self._starts_R1 = starts_R1
        self._slots_T = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self._contexts_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self._table_RW = torch.zeros(rows, limits.num_entries, dtype=torch.int32, device=device)

    def copy_from(self, group: GroupContext | StatePlan) -> None:
        assert isinstance(group, GroupContext)
        plan = group.plan
        tokens = len(group.slots_T)
        rows, width = plan.block_table_RW.shape
        self._slots_T[:tokens].copy_(group.slots_T)
        self._contexts_R[:rows].copy_(plan.context_lens_R)
        self._table_RW[:rows, :width].copy_(plan.block_table_RW)

    def pad(self, tokens: int, rows: int, size: int, row_size: int) -> None:
        self._slots_T[tokens:size].fill_(-1)
        self._contexts_R[rows:row_size].fill_(0)

    def context(self, tokens: int, rows: int) -> GroupContext:
        plan = AttentionPlan(
            self._table_RW[:rows],
            self._contexts_R[:rows],
            self._starts_R1[: rows + 1],
            num_tokens=tokens,
            min_query_len=1,
            max_query_len=tokens,
            max_context_len=self._limits.max_context,
            split_tokens=self._split_tokens,
            decode_query_len=1 + self._limits.num_drafts,
        )
        return GroupContext(self._slots_T[:tokens], plan)


class _StateBuffers:
    """Static inputs of one group of recurrent states."""

    def __init__(self, rows: int, starts_R1: torch.Tensor):
        self._starts_R1 = starts_R1
        self._slots_R = torch.full((rows,), NO_SLOT, dtype=torch.int64, device=starts_R1.device)
        self._fresh_R = torch.zeros(rows, dtype=torch.bool, device=starts_R1.device)

    def copy_from(self, plan: GroupContext | StatePlan) -> None:
        assert isinstance(plan, StatePlan)
        rows = len(plan.slots_R)
        self._slots_R[:rows].copy_(plan.slots_R)
        self._fresh_R[:rows].copy_(plan.fresh_R)

    def pad(self, tokens: int, rows: int, size: int, row_size: int) -> None:
        self._slots_R[rows:row_size].fill_(NO_SLOT)

    def context(self, tokens: int, rows: int) -> StatePlan:
        slots_R = self._slots_R[:rows]
        fresh_R = self._fresh_R[:rows]
        return StatePlan(
            slots_R, fresh_R, self._starts_R1[: rows + 1], num_tokens=tokens, max_query_len=tokens
        )


def _query_starts(group: GroupContext | StatePlan) -> torch.Tensor:
    return group.query_starts_R1 if isinstance(group, StatePlan) else group.plan.query_starts_R1
