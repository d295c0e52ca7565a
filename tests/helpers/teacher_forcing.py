"""A worker's logits at every place of a given text, not only where it draws."""

from collections.abc import Iterable

import torch

from atom.messages.worker import ScheduledBatch
from tests.helpers.core_side import CoreSide
from workers.layers.context import ForwardContext
from workers.worker import Worker


@torch.inference_mode()
def step_logits(worker: Worker, batch: ScheduledBatch) -> torch.Tensor:
    """Logits [T, V] of every token of one step."""
    runner = worker._runner
    runner._inputs.take(batch)
    step = runner._inputs.step(batch)
    context = ForwardContext(runner._kv_layers, step.groups)
    return runner._model.compute_logits(runner._model(step.ids_T, step.positions_T, context))


def forced_logits(worker: Worker, core: CoreSide, row: int, counts: Iterable[int]) -> torch.Tensor:
    """Logits [T, V] in float32 on the CPU, the row's known tokens being computed in pieces of `counts`."""
    return torch.cat([step_logits(worker, core.plan({row: count})).float().cpu() for count in counts])
