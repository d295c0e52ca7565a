"""Finds the model file of a checkpoint: its name is the `model_type` of config.json."""

import importlib
import pkgutil

import workers.models
from atom.config.checkpoint import Checkpoint
from workers.layers.causal_lm import CausalLM


def families() -> list[str]:
    """Every model_type that runs."""
    modules = pkgutil.iter_modules(workers.models.__path__)
    return sorted(module.name for module in modules if module.name != "registry")


def model_class(checkpoint: Checkpoint) -> type[CausalLM]:
    """The class of the checkpoint's architecture. Raises ValueError naming what runs."""
    runs = families()
    if checkpoint.model_type not in runs:
        raise ValueError(
            f"model type {checkpoint.model_type!r} is not supported; these are: {', '.join(runs)}"
        )
    architectures = importlib.import_module(f"workers.models.{checkpoint.model_type}").ARCHITECTURES
    if checkpoint.architecture not in architectures:
        raise ValueError(
            f"architecture {checkpoint.architecture!r} of model type {checkpoint.model_type!r} "
            f"is not supported; these are: {', '.join(architectures)}"
        )
    found: type[CausalLM] = architectures[checkpoint.architecture]
    return found
