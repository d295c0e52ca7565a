"""Tiny models of transformers as GGUF files, and their logits through the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from atom.shared.config.model import ModelConfig
from tests.helpers.checkpoints.gguf_files import TOKENS, Sizes, write_gguf
from tests.helpers.checkpoints.gguf_layout import in_file
from tests.helpers.checkpoints.tiny_models import Tiny, build_tiny, prompt_of
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from workers.checkpoint.prepare import prepare

Type = gguf.GGMLQuantizationType
SIZES = Sizes(heads=4, kv_heads=2, head_dim=16, hidden=64, ffn=96, layers=4)
IDS = prompt_of(80, seed=7)  # beyond the length before RoPE scaling
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "add_rope_scaling_type": gguf.RopeScalingType.YARN,
    "add_rope_scaling_factor": 8.0,
    "add_rope_scaling_orig_ctx_len": 64,
}
_COMMON = {
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_size": SIZES.hidden,
    "intermediate_size": SIZES.ffn,
    "num_hidden_layers": SIZES.layers,
    "head_dim": SIZES.head_dim,
    "vocab_size": len(TOKENS),
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Case:
    """A model of transformers, and what its file states."""

    architecture: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)
    """Methods of GGUFWriter."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """More than those of the model."""

    @property
    def row(self) -> Tiny:
        return Tiny(self.model_type, self.model_type, 3, _COMMON | self.config)

    @property
    def sizes(self) -> Sizes:
        return replace(SIZES, layers=self.row.config["num_hidden_layers"])

    def write(
        self,
        path: Path,
        model: torch.nn.Module,
        types: Type | Mapping[str, Type] | None = None,
        **more: Any,
    ) -> None:
        """The file of a model. `more`: what it states besides."""
        config: Any = model.config
        weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        if config.tie_word_embeddings:
            del weights["lm_head.weight"]
        stored = in_file(weights, self.architecture, config)
        stored |= {name: np.array(numbers, np.float32) for name, numbers in self.tensors.items()}
        write_gguf(path, stored, self.architecture, types, self.sizes, **self.stated, **more)


def saved(case: Case, path: Path, types: Type | Mapping[str, Type] | None = None) -> torch.nn.Module:
    """Writes the case's model; returns it."""
    model = build_tiny(case.row)
    case.write(path, model, types)
    return model


def silent(phase: str, done: int, total: int) -> None:
    """Ignores progress."""


def prepared(path: Path) -> Path:
    """The directory with the file's content."""
    return Path(prepare(ModelConfig(model=str(path)), path.parent / "cache", silent).directory)


def logits_of(directory: Path) -> torch.Tensor:
    """The engine's logits of IDS, whose prompt comes in two steps."""
    ours = TinyWorker(directory)
    core = ours.core()
    core.add(0, IDS)
    return forced_logits(ours.worker, core, 0, [50, 30])
