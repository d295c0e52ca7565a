"""Runs the steps of one rank: update the batch, forward pass, sampling, prompt log probabilities.

T tokens of the step, R sampled rows, P tokens with prompt log probabilities, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atom.messages.worker import ScheduledBatch
from atom_ops import TokenLogprobs, token_logprobs
from workers.decode_graphs import DecodeGraphs
from workers.group_rows import Rows
from workers.input_batch import DecodeBatch, InputBatch, PromptChunk, PromptLogprobRows, SamplingRows
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext
from workers.memory_guard import MemoryGuard, reason_of
from workers.pending_step import PendingStep, RecordEvent, StepOutput
from workers.prompt_graphs import PromptGraphs
from workers.sampler import Sampler, SamplerOutput, logprob_slice
from workers.state_slots import StateSlots
from workers.step_label import step_label

_FORWARD, _SAMPLING = "the forward pass", "sampling"
_PROMPT_LOGPROBS = "the prompt log probabilities"
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Graphs:
    """The captured graphs of a model."""

    decode: DecodeGraphs
    prompts: PromptGraphs


@dataclass(frozen=True, slots=True)
class _Forward:
    """A launched forward pass, and what to compute from its hidden states."""

    hidden_TD: torch.Tensor
    sampling: SamplingRows | None
    prompt: PromptLogprobRows | None
    decode_graphs: DecodeGraphs | None = None
    """Set if a captured decode step was replayed."""


class ModelRunner:
    """Runs steps one after another. Forward pass and sampling are separate: each may be a graph.

    If the device has too little memory for a part of a step, the rows that need this part fail.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[CacheLayer],
        inputs: InputBatch,
        sampler: Sampler,
        memory: MemoryGuard,
        record_event: RecordEvent,
        graphs: Graphs | None = None,
    ):
        """`graphs` are captured, of the same model, KV cache and inputs."""
        self._model = model
        self._kv_layers = kv_layers
        self._inputs = inputs
        self._sampler = sampler
        self._memory = memory
        self._record_event = record_event
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step on the device; does not wait for its results."""
        for new in batch.new_rows:
            self._sampler.set_row(new)
        self._inputs.update(batch)
        before = self._inputs.computed_tokens()
        forward = self._memory.attempt(_FORWARD, lambda: self._forward(batch))
        output = self._retry_decodes(batch, before) if forward is None else self._output(forward, {})
        return PendingStep(batch.step, output, self._record_event)

    def label(self, batch: ScheduledBatch) -> str:
        """The name of the step in traces; called before `launch`."""
        return step_label(batch, self._inputs.lengths(batch))

    def _forward(self, batch: ScheduledBatch) -> _Forward:
        decode_batch = self._inputs.decode_batch(batch)
        if self._graphs and decode_batch and self._graphs.decode.fits(decode_batch):
            return self._replay(self._graphs.decode, decode_batch)
        step = self._inputs.step(batch)
        if self._graphs and self._graphs.prompts.fits(step):
            hidden_TD = self._graphs.prompts.forward(step)
        else:
            hidden_TD = self._model(
                step.ids_T, step.positions_T, ForwardContext(self._kv_layers, step.groups)
            )
        return _Forward(hidden_TD, step.sampling, step.prompt_logprobs)

    def _replay(self, graphs: DecodeGraphs, decode_batch: DecodeBatch) -> _Forward:
        """Replay the forward pass of each row's next token."""
        positions = self._inputs.advance(decode_batch)
        output = graphs.forward(decode_batch)
        sampling = SamplingRows(
            decode_batch.rows, decode_batch.rows_R, decode_batch.tokens_R, positions, output.positions_R
        )
        return _Forward(output.hidden_RD, sampling, None, graphs)

    def _retry_decodes(self, batch: ScheduledBatch, before: Rows) -> StepOutput:
        """After a failed forward pass: fail the prefilling rows, and run the decodes without them.

        Computing a decode again writes the same KV again. Recurrent states may have been updated
        already, so with these every row fails. `before` are the computed tokens before the step.
        """
        rows, counts = np.array(batch.rows, np.int64), np.array(batch.counts or [1] * len(batch.rows))
        decodes = self._inputs.decodes(rows, before)
        has_states = any(isinstance(table, StateSlots) for table in self._inputs.tables)
        can_retry = decodes.any() and not decodes.all() and not has_states
        self._inputs.set_computed(rows, before[rows] + counts)
        failed = rows[~decodes] if can_retry else rows
        failures = dict.fromkeys(failed.tolist(), reason_of(_FORWARD))
        if not can_retry:
            return StepOutput(_NO_ROWS, failed=failures)
        rows = rows[decodes]
        self._inputs.set_computed(rows, before[rows])
        retry = ScheduledBatch(batch.step, rows.tolist())
        forward = self._memory.attempt(_FORWARD, lambda: self._forward(retry))
        if forward is None:
            self._inputs.set_computed(rows, before[rows] + 1)
            failures |= dict.fromkeys(rows.tolist(), reason_of(_FORWARD))
            return StepOutput(_NO_ROWS, failed=failures)
        return self._output(forward, failures)

    def _output(self, forward: _Forward, failures: dict[int, str]) -> StepOutput:
        """Sample, and compute prompt log probabilities; adds the rows for which either fails."""
        rows, sampled = _NO_ROWS, None
        if (sampling := forward.sampling) is not None:
            rows = sampling.rows
            sampled = self._memory.attempt(_SAMPLING, lambda: self._sample(forward, sampling))
            if sampled is None:
                failures |= dict.fromkeys(rows.tolist(), reason_of(_SAMPLING))
            else:
                failures |= {int(rows[index]): reason for index, reason in sampled.failed.items()}
        chunks: Sequence[PromptChunk] = []
        prompt_logprobs = None
        if (prompt := forward.prompt) is not None:
            chunks = prompt.chunks
            prompt_logprobs = self._memory.attempt(
                _PROMPT_LOGPROBS, lambda: self._prompt_logprobs(forward.hidden_TD, prompt)
            )
            if prompt_logprobs is None:
                failures |= dict.fromkeys((chunk.row for chunk in chunks), reason_of(_PROMPT_LOGPROBS))
        return StepOutput(rows, sampled, chunks, prompt_logprobs, failures)

    def _sample(self, forward: _Forward, sampling: SamplingRows) -> SamplerOutput:
        if (graphs := forward.decode_graphs) is not None:
            settings = self._sampler.plain_settings(sampling.rows)
            if settings is not None and graphs.can_sample(settings):
                return SamplerOutput(graphs.sample(settings))
        logits_RV = self._model.compute_logits(forward.hidden_TD.index_select(0, sampling.tokens_R))
        sampled = self._sampler.sample(logits_RV, sampling)
        self._inputs.store_sampled(sampling, sampled.ids_R)
        return sampled

    def _prompt_logprobs(self, hidden_TD: torch.Tensor, rows: PromptLogprobRows) -> TokenLogprobs:
        """Log probabilities of the prompt tokens `rows.next_ids_P`.

        Computed in slices: all logits together may need more memory than the model. Every rank
        makes the same slices, because each computes a shard of the logits.
        """
        size = logprob_slice(self._sampler.vocab_size)
        slices = zip(rows.tokens_P.split(size), rows.next_ids_P.split(size), strict=True)
        return TokenLogprobs.joined(
            [
                token_logprobs(self._model.compute_logits(hidden_TD.index_select(0, tokens)), ids, rows.top)
                for tokens, ids in slices
            ]
        )
