"""What a worker does before the first request, so that no request has to wait for it.

`tune` and `compile_model` come before the memory is measured, `warm_up` after everything is allocated.
"""

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import msgspec
import torch

from atom.shared.config.device import COMPILERS
from atom.shared.messages.engine import Sampling, pack_ids
from atom.shared.messages.images import LoadImage, RowImage
from atom.shared.messages.worker import NewRow, ScheduledBatch
from atom.shared.utils import envs
from atom.shared.utils.logger import get_logger
from atom_ops import backend
from workers.batch.step_padding import pad_groups
from workers.layers.attention.cache_groups import StateGroup
from workers.layers.context import ForwardContext
from workers.layers.linear import Linear
from workers.model_runner import ModelRunner
from workers.runner_builder import RunnerBuilder
from workers.shape_coordination import CoordinatedStep
from workers.vision.image_store import ImageStore

_GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_PROMPT_TOKENS = 128
_DECODES = 2
_IMAGE = b"warm up"


def tune(builder: RunnerBuilder) -> None:
    """Tune kernels; before memory is measured, so that its temporary memory is free again."""
    modules = chain.from_iterable(model.modules() for model in builder.model.with_draft)
    layers = (layer for layer in modules if isinstance(layer, Linear))
    weights = [layer.weight for layer in layers]
    backend.tune(builder.device, weights, Path(envs.ATOM_CACHE_DIR), builder.progress)


def compile_model(builder: RunnerBuilder) -> None:
    """Replace the forward pass by a compiled one, where --level says so."""
    level = builder.config.device.level
    if level not in COMPILERS:
        return
    from workers.graphs.compile_cache import compile_forward, directory_of  # imports torch's compiler

    model = builder.model
    device = builder.device
    blocks = [1] * len(model.kv_groups)
    kv_layers = builder.kv_layers(blocks)
    inputs = builder.inputs(builder.longest_sequence, blocks)

    def step(tokens: int) -> tuple[torch.Tensor, torch.Tensor, ForwardContext]:
        ids_T = torch.zeros(tokens, dtype=torch.int64, device=device)
        groups = pad_groups(inputs.empty_step().groups, tokens, 1)
        return ids_T, torch.zeros_like(ids_T), ForwardContext(kv_layers, groups)

    builder.progress("Compiling", 0, 1)
    directory = directory_of(Path(envs.ATOM_CACHE_DIR), builder.config, builder.checkpoint, device)
    with torch.inference_mode():
        compiled = compile_forward(model, step, level, directory)
    model.forward = compiled  # type: ignore[method-assign]
    builder.progress("Compiling", 1, 1)
    get_logger().info("level %d: %s compiled %d pieces", level, COMPILERS[level], compiled.num_pieces)


def warm_up(
    builder: RunnerBuilder, runner: ModelRunner, most_tokens: int, idle_step: Callable[[], CoordinatedStep]
) -> None:
    """Run a prompt and its decode steps: compiles kernels and touches memory before the first request.

    A model that reads images computes a prompt with one before, whose kernels may be others. The KV cache
    holds a sequence of `most_tokens`. Engines in lockstep run `idle_step` until all are done.
    """
    prompt = max(min(_PROMPT_TOKENS, builder.most_tokens, most_tokens - _DECODES), 1)
    tokens = min(most_tokens, prompt + _DECODES)
    decodes = tokens - prompt
    builder.progress("Warming up", 0, 1 + decodes)
    if builder.images is not None:
        _read_image(builder.images, runner, _prompt_step(builder, prompt, tokens))
    run_step(runner, _prompt_step(builder, prompt, tokens))
    for done in range(1, 1 + decodes):
        builder.progress("Warming up", done, 1 + decodes)
        run_step(runner, ScheduledBatch(-1, [0], num_drafts=builder.num_drafts))
    while builder.coordinator is not None and idle_step().shape is not None:
        pass  # the others still warm up
    builder.progress("Warming up", 1 + decodes, 1 + decodes)


def run_step(runner: ModelRunner, batch: ScheduledBatch) -> None:
    """Run a step at start, where no row may fail: raises torch.OutOfMemoryError."""
    for failure in runner.launch(batch).result().failed:
        raise torch.OutOfMemoryError(failure.reason)


def _read_image(images: ImageStore, runner: ModelRunner, batch: ScheduledBatch) -> None:
    """Run the step of a prompt, whose tokens become those of one image of zeros, as far as it has so many."""
    row = batch.new_rows[0]
    count = min(row.num_known, images.settings.max_tokens)
    images.load(LoadImage(_IMAGE, 1, count, bytes(count * images.settings.token_bytes)))
    row = msgspec.structs.replace(row, images=[RowImage(_IMAGE, 0, 1, count)])
    run_step(runner, msgspec.structs.replace(batch, new_rows=[row]))
    images.drop(_IMAGE)


def _prompt_step(builder: RunnerBuilder, prompt: int, reserved: int) -> ScheduledBatch:
    """A step that prefills a prompt, with blocks for `reserved` tokens."""
    blocks = list(range(-(-reserved // builder.config.block_tokens)))
    groups = builder.model.kv_groups
    block_ids = [[0] if isinstance(group, StateGroup) else blocks for group in groups]
    row = NewRow(0, prompt, 0, block_ids, _GREEDY, prompt)
    return ScheduledBatch(-1, [0], [prompt], [row], token_ids=pack_ids([0] * prompt))
