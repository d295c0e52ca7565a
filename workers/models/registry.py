"""Finds the model file of a checkpoint by the `model_type` of config.json."""

import importlib
from collections.abc import Iterator
from dataclasses import replace

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.online_quantization import OnlineQuantization
from workers.checkpoint.families import check_supported
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext, path_on_disk
from workers.layers.quantization.config import resolve


def model_class(checkpoint: Checkpoint) -> type[CausalLM]:
    """The class of the checkpoint's architecture. Raises ValueError that lists the supported ones."""
    check_supported(checkpoint.architecture, checkpoint.model_type)
    family = importlib.import_module(f"workers.models.{checkpoint.model_type}")
    found: type[CausalLM] = family.ARCHITECTURES[checkpoint.architecture]
    return found


def build_model(
    checkpoint: Checkpoint, build: BuildContext, online: OnlineQuantization | None = None
) -> CausalLM:
    """The checkpoint's model without its weights, which are quantized `online` while they are loaded.

    Raises ValueError for what is not supported.
    """
    family = model_class(checkpoint)
    config = checkpoint.hf_config
    if checkpoint.images is not None:
        config = {**config, "vision_config": checkpoint.images.vision_config}
    try:
        quantization = resolve(config, family.packed_modules_mapping, online)
        model = family(config, replace(build, quantization=quantization, renamed=family.renamed_on_disk))
    except KeyError as error:
        raise ValueError(f"config.json of {checkpoint.directory} lacks {error}") from error
    quantization.check_patterns(_paths(model))
    return model


def _paths(model: CausalLM) -> Iterator[str]:
    """Paths of all modules, here and in the checkpoint."""
    for path, _ in model.named_modules():
        yield path
        yield path_on_disk(path, model.renamed_on_disk)
