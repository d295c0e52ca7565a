"""Steps with pieces of prompts as graphs: launching their kernels one by one takes longer than they.

A step of T tokens in R rows runs the graph of the next captured numbers of tokens and rows. What
the host made for it is copied to where the graphs look:

    tokens   0 … T - 1 | padding: no slot, no row            ids, positions, slots
    rows     0 … R - 1 | padding: no queries, no context     contexts, query starts, block tables

Padding costs time with the tokens, so their numbers are captured closely; rows cost little.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from atom_ops import AttentionPlan
from workers.graph_recorder import Recorder, Replay
from workers.input_batch import InputBatch, StepInputs
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext, GroupContext

PROMPT_SIZES = (16, 32, 64, *range(128, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256))
"""Tokens of the captured steps: with more, a device takes longer than its host on any model."""

_FEW_ROWS = 16
"""With few rows attention cuts long contexts into more parts."""


class PromptGraphs:
    """The graphs of one model; `capture` first, then `forward` for every step that fits."""

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[CacheLayer],
        inputs: InputBatch,
        sizes: Sequence[int],
        record: Recorder,
        device: torch.device,
    ):
        """`sizes` are numbers of tokens, and rise."""
        limits, num_groups = inputs.limits, len(inputs.tables)
        self._model = model
        self._kv_layers = kv_layers
        self._limits = limits
        self._split_tokens = inputs.split_tokens
        self._record = record
        self._sizes = list(sizes)
        self._row_sizes = sorted({min(_FEW_ROWS, limits.max_rows), limits.max_rows})
        tokens, rows = self._sizes[-1], limits.max_rows
        self._ids_T = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._positions_T = torch.zeros_like(self._ids_T)
        self._slots_T = [torch.full_like(self._ids_T, -1) for _ in range(num_groups)]
        self._contexts_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self._starts_R1 = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._tables_RW = [
            torch.zeros(rows, limits.num_entries, dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self._graphs: dict[tuple[int, int], Replay] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[], None]) -> None:
        """Capture every size, the largest first: the smaller ones fit into the memory it took."""
        self._hidden_TD = self._run(self._sizes[-1], self._row_sizes[-1])
        for tokens in reversed(self._sizes):
            for rows in reversed(self._row_sizes):
                forward = partial(self._capture, tokens, rows)
                self._graphs[tokens, rows], _ = self._record(forward, f"tok_{tokens}_bs_{rows}")
            progress()

    def fit(self, step: StepInputs) -> bool:
        """Whether a captured size holds the step."""
        return len(step.ids_T) <= self._sizes[-1]

    def forward(self, step: StepInputs) -> torch.Tensor:
        """Launch the step's forward pass; hidden states [T, D], until the next one."""
        tokens, rows = len(step.ids_T), len(step.groups[0].plan.context_lens_R)
        size = self._sizes[bisect_left(self._sizes, tokens)]
        row_size = self._row_sizes[bisect_left(self._row_sizes, rows)]
        self._ids_T[:tokens].copy_(step.ids_T)
        self._positions_T[:tokens].copy_(step.positions_T)
        plan = step.groups[0].plan
        self._contexts_R[:rows].copy_(plan.context_lens_R)
        self._contexts_R[rows:row_size].fill_(0)
        self._starts_R1[: rows + 1].copy_(plan.query_starts_R1)
        self._starts_R1[rows + 1 : row_size + 1].fill_(tokens)
        for group, slots_T, table_RW in zip(step.groups, self._slots_T, self._tables_RW, strict=True):
            slots_T[:tokens].copy_(group.slots_T)
            slots_T[tokens:size].fill_(-1)
            table_RW[:rows, : group.plan.block_table_RW.shape[1]].copy_(group.plan.block_table_RW)
        self._graphs[size, row_size]()
        return self._hidden_TD[:tokens]

    def _capture(self, tokens: int, rows: int) -> None:
        self._hidden_TD[:tokens].copy_(self._run(tokens, rows))

    def _run(self, tokens: int, rows: int) -> torch.Tensor:
        groups = []
        for slots_T, table_RW in zip(self._slots_T, self._tables_RW, strict=True):
            plan = AttentionPlan(
                table_RW[:rows],
                self._contexts_R[:rows],
                self._starts_R1[: rows + 1],
                num_tokens=tokens,
                min_query_len=1,
                max_query_len=tokens,
                max_context_len=self._limits.max_model_len,
                split_tokens=self._split_tokens,
            )
            groups.append(GroupContext(slots_T[:tokens], plan))
        context = ForwardContext(self._kv_layers, groups)
        return self._model(self._ids_T[:tokens], self._positions_T[:tokens], context)
