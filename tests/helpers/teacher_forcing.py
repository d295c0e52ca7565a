"""A worker's logits at every place of a given text."""

from collections.abc import Iterable

import torch

from tests.helpers.core_side import CoreSide
from workers.layers.context import ForwardContext
from workers.worker import Worker


@torch.inference_mode()
def forced_logits(worker: Worker, core: CoreSide, row: int, counts: Iterable[int]) -> torch.Tensor:
    """Logits [tokens, V] on the CPU, the row's known tokens being computed in pieces of `counts`."""
    runner, pieces = worker._runner, []
    for count in counts:
        batch = core.plan({row: count})
        runner._inputs.take(batch)
        step = runner._inputs.step(batch)
        hidden = runner._model(step.ids_T, step.positions_T, ForwardContext(runner._kv_layers, step.groups))
        pieces.append(runner._model.compute_logits(hidden).float().cpu())
    return torch.cat(pieces)
