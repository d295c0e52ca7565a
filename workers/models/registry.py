"""Finds the model file of a checkpoint by the `model_type` of config.json."""

import importlib

from atom.config.checkpoint import Checkpoint
from workers.families import check_supported
from workers.layers.causal_lm import CausalLM


def model_class(checkpoint: Checkpoint) -> type[CausalLM]:
    """The class of the checkpoint's architecture. Raises ValueError that lists the supported ones."""
    check_supported(checkpoint.architecture, checkpoint.model_type)
    family = importlib.import_module(f"workers.models.{checkpoint.model_type}")
    found: type[CausalLM] = family.ARCHITECTURES[checkpoint.architecture]
    return found
