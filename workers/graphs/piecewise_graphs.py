"""CUDA graphs of steps in pieces, between which attention runs eagerly: see `piecewise_recorder`.

A step of T tokens replays the pieces of the next captured number of tokens, whatever its rows.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from workers.batch.input_batch import InputBatch
from workers.batch.step_inputs import StepInputs
from workers.batch.step_padding import num_rows, pad_groups
from workers.graphs.piecewise_recorder import PiecewiseRecorder, ReplayPiecewise
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext


class PiecewiseGraphs:
    """The pieces of one model: `capture` once, then `forward` for every step that fits."""

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[CacheLayer],
        inputs: InputBatch,
        sizes: Sequence[int],
        record: PiecewiseRecorder,
        device: torch.device,
    ):
        """`sizes` are numbers of tokens, ascending."""
        self._model = model
        self._kv_layers = kv_layers
        self._inputs = inputs
        self._record = record
        self._sizes = list(sizes)
        self._ids_T = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)
        self._positions_T = torch.zeros_like(self._ids_T)
        self._pieces: dict[int, ReplayPiecewise] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[], None]) -> None:
        """Capture every size, the largest first: smaller ones reuse its memory."""
        largest = self._sizes[-1]
        self._hidden_TD = self._run(largest, self._padding(largest))
        for tokens in reversed(self._sizes):
            self._pieces[tokens] = self._record(partial(self._forward, tokens), self._padding(tokens))
            progress()

    @property
    def token_sizes(self) -> list[int]:
        """Tokens of the captured steps, ascending."""
        return self._sizes

    @property
    def row_sizes(self) -> list[int]:
        """Any number of rows."""
        return [self._inputs.limits.max_rows]

    def forward(self, step: StepInputs, size: int, row_size: int) -> torch.Tensor:
        """Launch the step's forward pass, padded to `size` tokens, a captured size; rows are not padded.

        Returns hidden states [T, D], which the next pass overwrites.
        """
        tokens = len(step.ids_T)
        self._ids_T[:tokens].copy_(step.ids_T)
        self._positions_T[:tokens].copy_(step.rope_positions)
        self._pieces[size](self._context(step, size, num_rows(step.groups)))
        return self._hidden_TD[:tokens]

    def dummy(self, size: int, row_size: int) -> torch.Tensor:
        """Launch the forward pass of padding alone, which writes nothing; returns hidden states."""
        self._pieces[size](self._padding(size))
        return self._hidden_TD[:size]

    def _padding(self, tokens: int) -> ForwardContext:
        """The context of a step of one padding row."""
        return self._context(self._inputs.empty_step(), tokens, 1)

    def _context(self, step: StepInputs, tokens: int, rows: int) -> ForwardContext:
        return ForwardContext(self._kv_layers, pad_groups(step.groups, tokens, rows))

    def _forward(self, tokens: int, context: ForwardContext) -> None:
        self._hidden_TD[:tokens].copy_(self._run(tokens, context))

    def _run(self, tokens: int, context: ForwardContext) -> torch.Tensor:
        return self._model(self._ids_T[:tokens], self._positions_T[:tokens], context)
