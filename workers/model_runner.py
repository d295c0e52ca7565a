"""Runs the steps of one rank: update the batch, forward pass, sampling, prompt log probabilities.

T tokens of the step, R sampled rows, P tokens with prompt log probabilities, D hidden, V vocabulary.
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
from workers.pending_step import PendingStep, RecordEvent
from workers.prompt_graphs import PromptGraphs
from workers.sampler import Sampler, SamplerOutput
from workers.step_label import step_label

_LOGITS_PER_SLICE = 1 << 24  # logits of prompt tokens held at a time: 64 MiB of float32


@dataclass(frozen=True, slots=True)
class Graphs:
    """The captured graphs of a model."""

    decode: DecodeGraphs
    prompts: PromptGraphs


class ModelRunner:
    """Runs steps one after another. Forward pass and sampling are separate: each may be a graph."""

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[CacheLayer],
        inputs: InputBatch,
        sampler: Sampler,
        record_event: RecordEvent,
        graphs: Graphs | None = None,
    ):
        """`graphs` are captured, of the same model, KV cache and inputs."""
        self._model = model
        self._kv_layers = kv_layers
        self._inputs = inputs
        self._sampler = sampler
        self._record_event = record_event
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step on the device; does not wait for its results."""
        for new in batch.new_rows:
            self._sampler.set_row(new)
        self._inputs.take(batch)
        decode_batch = self._inputs.decode_batch(batch)
        if self._graphs and decode_batch and self._graphs.decode.fits(decode_batch):
            return PendingStep(
                batch.step, self._record_event, self._replay(self._graphs.decode, decode_batch)
            )
        step = self._inputs.step(batch)
        hidden_TD = self._forward(step)
        sampled = self._sample(hidden_TD, step.draw) if step.draw else None
        if step.scored is None:
            return PendingStep(batch.step, self._record_event, sampled)
        return PendingStep(
            batch.step,
            self._record_event,
            sampled,
            step.scored.pieces,
            self._prompt_logprobs(hidden_TD, step.scored),
        )

    def label(self, batch: ScheduledBatch) -> str:
        """The name of the step in traces; called before `launch`."""
        return step_label(batch, self._inputs.lengths(batch))

    def _forward(self, step: StepInputs) -> torch.Tensor:
        if self._graphs and self._graphs.prompts.fits(step):
            return self._graphs.prompts.forward(step)
        return self._model(step.ids_T, step.positions_T, ForwardContext(self._kv_layers, step.groups))

    def _replay(self, graphs: DecodeGraphs, decode_batch: DecodeBatch) -> SamplerOutput:
        """Compute and sample the next token of each row."""
        positions = self._inputs.advance(decode_batch)
        output = graphs.forward(decode_batch)
        settings = self._sampler.plain_settings(decode_batch.rows)
        if settings is not None and graphs.can_sample(settings):
            return SamplerOutput(graphs.sample(settings), [], None)
        sampling = SamplingRows(
            decode_batch.rows, decode_batch.rows_R, decode_batch.tokens_R, positions, output.positions_R
        )
        return self._sample(output.hidden_RD, sampling)

    def _sample(self, hidden_TD: torch.Tensor, sampling: SamplingRows) -> SamplerOutput:
        logits_RV = self._model.compute_logits(hidden_TD.index_select(0, sampling.tokens_R))
        sampled = self._sampler.sample(logits_RV, sampling)
        self._inputs.keep(sampling, sampled.ids_R)
        return sampled

    def _prompt_logprobs(self, hidden_TD: torch.Tensor, rows: PromptLogprobRows) -> TokenLogprobs:
        """Log probabilities of the prompt tokens `rows.next_ids_P`.

        Computed in slices: all logits together may need more memory than the model. Every rank
        makes the same slices, because each computes a shard of the logits.
        """
        size = max(1, _LOGITS_PER_SLICE // self._sampler.vocab_size)
        slices = zip(rows.tokens_P.split(size), rows.next_ids_P.split(size), strict=True)
        return TokenLogprobs.joined(
            [
                token_logprobs(self._model.compute_logits(hidden_TD.index_select(0, tokens)), ids, rows.top)
                for tokens, ids in slices
            ]
        )
