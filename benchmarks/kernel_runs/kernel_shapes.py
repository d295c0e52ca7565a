"""The shapes of a model's op calls in a step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atom.benchmarks.serving.errors import BenchmarkError

__all__ = ["MODELS", "STEPS", "ModelShape", "StepShape", "config_file", "model_shape"]

_SHIPPED = Path(__file__).parent.with_name("models")
MODELS = sorted(path.name for path in _SHIPPED.iterdir())
BLOCK_SIZE = 16


@dataclass(frozen=True)
class LatentShape:
    """The widths of latent attention."""

    query: int | None
    """Width of the queries' latent; None: queries have none."""
    latent: int
    """Width of the latent of keys and values."""
    nope: int
    """Features of a query without RoPE."""
    rope: int
    """Features of a query and a key with RoPE."""
    value: int

    @property
    def row(self) -> int:
        """Features of a cache row."""
        return self.latent + self.rope

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "LatentShape | None":
        """None for a model without latent attention; KeyError for a missing size."""
        if "kv_lora_rank" not in config:
            return None
        return cls(
            config.get("q_lora_rank"),
            config["kv_lora_rank"],
            config["qk_nope_head_dim"],
            config["qk_rope_head_dim"],
            config["v_head_dim"],
        )


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder on one worker."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    features: int
    """Features of half a gated projection."""
    vocab: int
    head_norms: bool = False
    """Whether query and key heads have norms."""
    experts: int = 0
    chosen: int = 0
    """Experts of each token."""
    expert_features: int = 0
    latent: LatentShape | None = None

    @property
    def qkv(self) -> int:
        """Output features of the QKV projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From a config.json; KeyError for a missing size."""
        heads = config["num_attention_heads"]
        hidden = config["hidden_size"]
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = next((config[name] for name in names if config.get(name)), 0)
        return cls(
            hidden,
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config["intermediate_size"],
            config["vocab_size"],
            head_norms=str(config.get("model_type", "")).startswith("qwen3"),
            experts=experts,
            chosen=config["num_experts_per_tok"] if experts else 0,
            expert_features=config.get("moe_intermediate_size") or config["intermediate_size"],
            latent=LatentShape.from_config(config),
        )


def config_file(model: str) -> Path:
    """The config.json of a shipped configuration or of a directory; raises BenchmarkError."""
    path = (_SHIPPED / model if model in MODELS else Path(model)) / "config.json"
    if not path.is_file():
        raise BenchmarkError(
            f"--model {model}: no directory with config.json; shipped are {', '.join(MODELS)}"
        )
    return path


def model_shape(model: str) -> ModelShape:
    """The shape of a shipped configuration or a directory with config.json; raises BenchmarkError."""
    path = config_file(model)
    try:
        return ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{path} does not give a decoder's sizes: {error!r}") from None


@dataclass(frozen=True)
class StepShape:
    """One step: `rows` rows of `new` tokens each, the last ones of a context of `context` tokens."""

    name: str
    rows: int
    new: int
    """Context tokens of each row."""
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.new

    @property
    def seen(self) -> int:
        """Pairs of a query token and a token that it attends to."""
        before = self.context - self.new
        return self.rows * (self.new * before + self.new * (self.new + 1) // 2)

    @property
    def blocks_per_row(self) -> int:
        return -(-self.context // BLOCK_SIZE)

    def block_table(self) -> NDArray[np.int32]:
        """[rows, blocks]: every block once, in random order."""
        count = self.rows * self.blocks_per_row
        table: NDArray[np.int32] = np.random.default_rng(1).permutation(count).astype(np.int32)
        return table.reshape(self.rows, self.blocks_per_row)

    def slots(self) -> NDArray[np.int64]:
        """Cache slots of the new tokens, [tokens]."""
        at = np.arange(self.context - self.new, self.context)
        slots: NDArray[np.int64] = self.block_table()[:, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        return slots.astype(np.int64).ravel()


STEPS = {
    step.name: step
    for step in (
        StepShape("decode-1", 1, 1, 1024),
        StepShape("decode-16", 16, 1, 1024),
        StepShape("decode-64", 64, 1, 1024),
        StepShape("decode-256", 256, 1, 1024),
        StepShape("decode-1x4096", 1, 1, 4096),
        StepShape("decode-64x4096", 64, 1, 4096),
        StepShape("decode-256x4096", 256, 1, 4096),
        StepShape("prefill-256", 1, 256, 256),
        StepShape("prefill-1024", 1, 1024, 1024),
        StepShape("prefill-4096", 1, 4096, 4096),
        StepShape("prefill-8x1024", 8, 1024, 1024),
    )
}
