"""Runs the steps of one rank: update the batch, forward pass, sampling, prompt log probabilities.

T tokens of the step, R sampled rows, P tokens with prompt log probabilities, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from atom.shared.messages.worker import ScheduledBatch
from atom_ops import TokenLogprobs, token_logprobs
from workers.batch.input_batch import InputBatch
from workers.batch.state_slots import copy_states
from workers.batch.step_inputs import AppliedBatch, PromptChunk, PromptLogprobRows, SamplingRows, StepInputs
from workers.batch.step_label import step_label
from workers.batch.step_padding import pad_step
from workers.batch.step_shape import CoordinateShape, GraphSizes, StepMode, StepShape, no_coordination
from workers.graphs.decode_graphs import DecodeGraphs
from workers.graphs.piecewise_graphs import PiecewiseGraphs
from workers.graphs.prompt_graphs import PromptGraphs
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext
from workers.memory.memory_guard import MemoryGuard, reason_of
from workers.pending_step import Advance, PendingStep, RecordEvent, StepOutput
from workers.sampling.sampler import Sampler, SamplerOutput, logprob_slice
from workers.spec_decode.draft_rows import Computed, Draws, Verified

_FORWARD = "the forward pass"
_SAMPLING = "sampling"
_DRAFTING = "drafting"
_PROMPT_LOGPROBS = "the prompt log probabilities"
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Graphs:
    """The captured graphs of a model: of decode steps, and of steps of any rows."""

    decode: Sequence[DecodeGraphs] = ()
    """All have the same rows, and each another number of tokens a row."""
    prompts: PromptGraphs | PiecewiseGraphs | None = None

    @property
    def sizes(self) -> GraphSizes:
        prompts = self.prompts
        return GraphSizes(
            self.decode[0].sizes if self.decode else (),
            prompts.token_sizes if prompts else (),
            prompts.row_sizes if prompts else (),
            [graphs.tokens_per_row for graphs in self.decode],
        )

    def decode_of(self, tokens_per_row: int) -> DecodeGraphs:
        """The graphs of decode steps with so many tokens a row. Raises StopIteration without any."""
        return next(graphs for graphs in self.decode if graphs.tokens_per_row == tokens_per_row)


@dataclass(frozen=True, slots=True)
class _Forward:
    """A launched forward pass, and what to compute from its hidden states."""

    hidden_TD: torch.Tensor
    computed: Computed
    sampling: SamplingRows | None
    prompt: PromptLogprobRows | None
    decode_graphs: DecodeGraphs | None = None
    """Set if a captured decode step was replayed."""


class ModelRunner:
    """Runs steps one after another. Forward pass and sampling are separate: each may be a graph.

    If the device has too little memory for a part of a step, the rows that need this part fail.
    """

    before_step: Callable[[], None] | None = None
    """Called before every forward pass, dummy ones too; after the ranks have agreed on it."""

    def __init__(
        self,
        model: CausalLM,
        kv_layers: Sequence[CacheLayer],
        inputs: InputBatch,
        sampler: Sampler,
        memory: MemoryGuard,
        record_event: RecordEvent,
        graphs: Graphs | None = None,
        coordinate: CoordinateShape = no_coordination,
    ):
        """`graphs` are captured, of the same model, KV cache and inputs."""
        self._model = model
        self._kv_layers = kv_layers
        self._inputs = inputs
        self._sampler = sampler
        self._memory = memory
        self._record_event = record_event
        self._graphs = graphs or Graphs()
        self._coordinate = coordinate
        self._sizes = self._graphs.sizes

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step on the device; does not wait for its results."""
        for new in batch.new_rows:
            self._sampler.set_row(new)
        applied = self._inputs.apply(batch)
        for copies in (batch.state_saves, batch.state_restores):
            if copies:
                copy_states(copies, self._model.kv_groups, self._kv_layers)
        forward = self._memory.attempt(_FORWARD, lambda: self._forward(applied))
        output = self._retry_decodes(applied) if forward is None else self._output(forward, {})
        return PendingStep(batch.step, output, self._record_event)

    @torch.inference_mode()
    def dummy_step(self, shape: StepShape) -> None:
        """Launch a step of padding alone, for a rank without requests while others step.

        `shape` is the one that the ranks agreed on. Computes its tokens and takes part in the model's
        collectives; changes no KV slot, no state and no row, and samples nothing. Raises ValueError for
        a shape that is not captured, or without tokens or rows.
        """
        self._sizes.check(shape)
        if self.before_step is not None:
            self.before_step()
        if shape.mode is StepMode.EAGER:
            hidden_TD = self._compute(pad_step(self._inputs.empty_step(), shape))
        elif shape.mode is StepMode.DECODE_GRAPH:
            hidden_TD = self._graphs.decode_of(shape.tokens_per_row).dummy(shape.padded_rows)
        else:
            hidden_TD = self._prompt_graphs.dummy(shape.padded_tokens, shape.padded_rows)
        if self._drafts_in_lockstep:
            step = pad_step(self._inputs.empty_step(), shape)
            context = ForwardContext(self._kv_layers, step.groups)
            self._observe(Computed(step.ids_T, step.positions_T, hidden_TD, context))

    def label(self, batch: ScheduledBatch) -> str:
        """The name of the step in traces; called before `launch`."""
        return step_label(batch, self._inputs.lengths(batch))

    def _forward(self, applied: AppliedBatch) -> _Forward:
        tokens_per_row = 1 + applied.num_drafts if applied.is_uniform else 0
        tokens = self._inputs.num_step_tokens(applied)
        eager = self._inputs.needs_eager(applied)
        planned = self._sizes.plan(tokens, len(applied.rows), tokens_per_row, eager)
        self._inputs.plan_passes(applied)
        shape = self._coordinate(planned)
        if shape is not planned:
            self._sizes.check(shape)
            shape.require(planned)
        if self.before_step is not None:
            self.before_step()
        if shape.mode is StepMode.DECODE_GRAPH:
            return self._replay(self._graphs.decode_of(shape.tokens_per_row), applied, shape.padded_rows)
        step = self._inputs.step(applied)
        if self._drafts_in_lockstep:  # the model that drafts computes the tokens of the shape, too
            step = pad_step(step, shape)
        if shape.mode is StepMode.PROMPT_GRAPH and len(step.ids_T):  # none if all rows are at their limits
            hidden_TD = self._prompt_graphs.forward(step, shape.padded_tokens, shape.padded_rows)
        else:
            step = pad_step(step, shape)
            hidden_TD = self._compute(step)
        context = ForwardContext(self._kv_layers, step.groups)
        computed = Computed(
            step.ids_T,
            step.positions_T,
            hidden_TD,
            context,
            step.next_ids_T,
            step.rope_positions,
            step.next_images,
        )
        return _Forward(hidden_TD, computed, step.sampling, step.prompt_logprobs)

    def _compute(self, step: StepInputs) -> torch.Tensor:
        context = ForwardContext(self._kv_layers, step.groups, images=step.images)
        if step.images is None:
            return self._model(step.ids_T, step.rope_positions, context)
        # A forward pass that --level has compiled has no place for images.
        return type(self._model).forward(self._model, step.ids_T, step.rope_positions, context)

    @property
    def _prompt_graphs(self) -> PromptGraphs | PiecewiseGraphs:
        assert self._graphs.prompts is not None, "without graphs every shape is eager"
        return self._graphs.prompts

    def _replay(self, graphs: DecodeGraphs, applied: AppliedBatch, size: int) -> _Forward:
        """Replay the forward pass of each row's next tokens."""
        uniform = self._inputs.uniform_decode(applied)
        positions = self._inputs.advance(applied)
        output = graphs.forward(uniform, size)
        sampling = SamplingRows(
            uniform.token_rows,
            uniform.rows_R,
            uniform.tokens_S,
            positions,
            output.positions_S,
            output.draft_rows(uniform),
        )
        return _Forward(output.hidden_SD, output.computed, sampling, None, graphs)

    def _retry_decodes(self, applied: AppliedBatch) -> StepOutput:
        """After a failed forward pass: fail the prefilling rows, and run the decodes without them.

        Computing a decode again writes the same KV again. Recurrent states may have been updated
        already, so with these every row fails.
        """
        rows = applied.rows
        decodes = applied.decodes
        can_retry = decodes.any() and not decodes.all() and not self._inputs.has_states
        # Failed rows count as computed: the engine core schedules no further step of them.
        self._inputs.set_computed(rows, applied.starts + applied.counts)
        failed = rows[~decodes] if can_retry else rows
        failures = dict.fromkeys(failed.tolist(), reason_of(_FORWARD))
        if not can_retry:
            return StepOutput(_NO_ROWS, failed=failures)
        retry = self._inputs.decoding(applied)
        self._inputs.set_computed(retry.rows, retry.starts)
        forward = self._memory.attempt(_FORWARD, lambda: self._forward(retry))
        if forward is None:
            self._inputs.set_computed(retry.rows, retry.starts + retry.counts)
            failures |= dict.fromkeys(retry.rows.tolist(), reason_of(_FORWARD))
            return StepOutput(_NO_ROWS, failed=failures)
        return self._output(forward, failures)

    def _output(self, forward: _Forward, failures: dict[int, str]) -> StepOutput:
        """Sample, and compute prompt log probabilities; adds the rows for which either fails."""
        rows = _NO_ROWS
        sampled = None
        advance = None
        late: Sequence[int] = ()
        refused: dict[int, str] = {}
        if (sampling := forward.sampling) is not None:
            rows = sampling.rows
            result = self._memory.attempt(_SAMPLING, lambda: self._sample(forward, sampling))
            if result is None:
                failures |= dict.fromkeys(rows.tolist(), reason_of(_SAMPLING))
            else:
                sampled, verified = result
                failures |= {int(rows[index]): reason for index, reason in sampled.failed.items()}
                late = [int(rows[index]) for index in sampled.late]
                refused = {int(rows[index]): reason for index, reason in sampled.refused.items()}
                if verified is not None and sampling.drafts is not None:
                    advance = Advance(sampling.drafts, verified, self._inputs.settle(sampling.drafts))
        else:
            self._observe(forward.computed)
        chunks: Sequence[PromptChunk] = []
        prompt_logprobs = None
        if (prompt := forward.prompt) is not None:
            chunks = prompt.chunks
            prompt_logprobs = self._memory.attempt(
                _PROMPT_LOGPROBS, lambda: self._prompt_logprobs(forward.hidden_TD, prompt)
            )
            if prompt_logprobs is None:
                failures |= dict.fromkeys((chunk.row for chunk in chunks), reason_of(_PROMPT_LOGPROBS))
        return StepOutput(rows, sampled, chunks, prompt_logprobs, failures, refused, late, advance)

    @property
    def _drafts_in_lockstep(self) -> bool:
        speculation = self._inputs.speculation
        return speculation is not None and speculation.passes is not None

    def _observe(self, computed: Computed) -> None:
        """Let what drafts follow a step that samples nothing."""
        speculation = self._inputs.speculation
        if speculation is not None:
            self._memory.attempt(_DRAFTING, lambda: speculation.observe(computed))

    def _sample(self, forward: _Forward, sampling: SamplingRows) -> tuple[SamplerOutput, Verified | None]:
        settings = self._sampler.plain_settings(sampling)
        graphs = forward.decode_graphs
        if settings is not None and graphs is not None and graphs.can_sample(settings):
            ids_S, verified = graphs.sample(settings)
            if verified is None and sampling.drafts is not None:  # the host verifies and proposes
                verified = self._inputs.store_sampled(sampling, self._draws(forward, sampling, ids_S))
            return SamplerOutput(ids_S if verified is None else verified.ids_S), verified
        hidden_RD = forward.hidden_TD.index_select(0, sampling.tokens_R)
        if settings is not None:
            sampled = SamplerOutput(self._model.sample(hidden_RD, settings, sampling.positions_R))
        else:
            sampled = self._sampler.sample(self._model.compute_logits(hidden_RD), sampling)
        draws = self._draws(forward, sampling, sampled.ids_R)
        verified = self._inputs.store_sampled(sampling, draws)
        if verified is not None and self._inputs.speculation is not None:
            self._sampler.propose(self._inputs.speculation.state.drafts_NK)
            sampled = replace(sampled, ids_R=verified.ids_S)
        return sampled, verified

    def _draws(self, forward: _Forward, sampling: SamplingRows, ids_S: torch.Tensor) -> Draws:
        settings = None
        speculation = self._inputs.speculation
        if speculation is not None and speculation.runs_model and sampling.drafts is not None:
            settings = self._sampler.row_settings(sampling.drafts.rows)
        return Draws(forward.computed, ids_S, sampling.tokens_R, settings)

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
