"""The order of one step; every part of it is somebody else's work.

T tokens of the step, R rows that draw, P tokens whose next prompt tokens are scored, D hidden,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atom.messages.worker import ScheduledBatch
from atom_ops import TokenLogprobs, token_logprobs
from workers.decode_graphs import DecodeGraphs
from workers.input_batch import DecodeBatch, InputBatch, PromptLogprobRows, SamplingRows, StepInputs
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext
from workers.pending_step import PendingStep
from workers.prompt_graphs import PromptGraphs
from workers.sampler import Sampler, SamplerOutput
from workers.step_label import step_label

_SCORED_LOGITS = 1 << 24  # logits of prompt tokens held at a time: 64 MiB of float32


@dataclass(frozen=True, slots=True)
class Graphs:
    """What is captured of a model."""

    decode: DecodeGraphs
    prompts: PromptGraphs


class ModelRunner:
    """Runs steps one after another. Forward and sampling are apart: each may become a graph."""

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[CacheLayer],
        inputs: InputBatch,
        sampler: Sampler,
        graphs: Graphs | None = None,
    ):
        """`graphs` are of the same model, cache and inputs, and captured."""
        self._model = model
        self._kv_layers = kv_layers
        self._inputs = inputs
        self._sampler = sampler
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Put one step on the device; does not wait for its results."""
        for new in batch.new_rows:
            self._sampler.set_row(new)
        self._inputs.take(batch)
        decode_batch = self._inputs.decode_batch(batch)
        if self._graphs and decode_batch and self._graphs.decode.fit(decode_batch):
            return PendingStep(batch.step, self._replay(self._graphs.decode, decode_batch))
        step = self._inputs.step(batch)
        hidden_TD = self._forward(step)
        drawn = self._draw(hidden_TD, step.draw) if step.draw else None
        if step.scored is None:
            return PendingStep(batch.step, drawn)
        return PendingStep(batch.step, drawn, step.scored.pieces, self._score(hidden_TD, step.scored))

    def label(self, batch: ScheduledBatch) -> str:
        """What a trace calls the step that `batch` is about to become."""
        return step_label(batch, self._inputs.lengths(batch))

    def _forward(self, step: StepInputs) -> torch.Tensor:
        if self._graphs and self._graphs.prompts.fit(step):
            return self._graphs.prompts.forward(step)
        return self._model(step.ids_T, step.positions_T, ForwardContext(self._kv_layers, step.groups))

    def _replay(self, graphs: DecodeGraphs, decode_batch: DecodeBatch) -> SamplerOutput:
        """One more token for each of these rows."""
        positions = self._inputs.advance(decode_batch)
        forwarded = graphs.forward(decode_batch)
        settings = self._sampler.plain_settings(decode_batch.rows)
        if settings is not None and graphs.can_sample(settings):
            return SamplerOutput(graphs.draw(settings), [], None)
        draw = SamplingRows(
            decode_batch.rows, decode_batch.rows_R, decode_batch.tokens_R, positions, forwarded.positions_R
        )
        return self._draw(forwarded.hidden_RD, draw)

    def _draw(self, hidden_TD: torch.Tensor, draw: SamplingRows) -> SamplerOutput:
        logits_RV = self._model.compute_logits(hidden_TD.index_select(0, draw.tokens_R))
        drawn = self._sampler.draw(logits_RV, draw)
        self._inputs.keep(draw, drawn.ids_R)
        return drawn

    def _score(self, hidden_TD: torch.Tensor, scored: PromptLogprobRows) -> TokenLogprobs:
        """Log probabilities of the prompt tokens that follow the scored ones.

        Slice by slice: their logits together may take more memory than the model. Every rank
        makes the same slices, for each takes part in the logits.
        """
        size = max(1, _SCORED_LOGITS // self._sampler.vocab_size)
        slices = zip(scored.tokens_P.split(size), scored.next_ids_P.split(size), strict=True)
        return TokenLogprobs.joined(
            [
                token_logprobs(self._model.compute_logits(hidden_TD.index_select(0, tokens)), ids, scored.top)
                for tokens, ids in slices
            ]
        )
