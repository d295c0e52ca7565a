"""The order of one step; every part of it is somebody else's work.

T tokens of the step, R rows that draw, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch

from atom.messages.worker import ScheduledBatch
from atom_ops import KVLayer
from workers.input_batch import InputBatch
from workers.layers.causal_lm import CausalLM
from workers.layers.context import ForwardContext
from workers.sampler import Sampler


class PendingStep:
    """A step given to the device; its ids reach the host when the device gets there."""

    def __init__(self, step: int, ids_R: torch.Tensor | None):
        self.step = step
        self._ids = ids_R
        self._copied: torch.cuda.Event | None = None
        if ids_R is not None and ids_R.is_cuda:
            self._ids = torch.empty(ids_R.shape, dtype=torch.int32, pin_memory=True)
            self._ids.copy_(ids_R, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def ready(self) -> bool:
        """Whether `token_ids` returns at once."""
        return self._copied is None or self._copied.query()

    def token_ids(self) -> bytes:
        """The drawn ids, packed int32, in batch order; waits for the device where it must."""
        if self._ids is None:
            return b""
        if self._copied is not None:
            self._copied.synchronize()
        return self._ids.to(torch.int32).numpy().astype("<i4", copy=False).tobytes()


class ModelRunner:
    """Runs steps one after another. Forward and sampling are apart: each may become a graph."""

    def __init__(self, model: CausalLM, kv_layers: Sequence[KVLayer], inputs: InputBatch, sampler: Sampler):
        self._model = model
        self._kv_layers = kv_layers
        self._inputs = inputs
        self._sampler = sampler

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Put one step on the device; does not wait for its ids."""
        for new in batch.new_rows:
            self._sampler.set_row(new.row, new.sampling)
        step = self._inputs.apply(batch)
        context = ForwardContext(self._kv_layers, step.groups)
        hidden_TD = self._model(step.ids_T, step.positions_T, context)
        if step.draw is None:
            return PendingStep(batch.step, None)
        logits_RV = self._model.compute_logits(hidden_TD.index_select(0, step.draw.tokens_R))
        ids_R = self._sampler.draw(logits_RV, step.draw.rows, step.draw.positions_R)
        self._inputs.keep(step.draw, ids_R)
        return PendingStep(batch.step, ids_R)
