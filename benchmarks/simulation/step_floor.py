"""The least time of a decode step: its bytes by kind, and its operations, at a GPU's measured rates.

    floor = max(bytes / rate of reads, operations / rate of a GEMM)

Unlike the roofline of the simulation this knows quantized weights, sliding windows and draft heads. Norms,
biases, activations and logits are left out: a step could keep them on the chip.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.kernel_runs.kernel_shapes import ModelShape, config_file
from benchmarks.simulation.decoder import Decoder, decoder
from benchmarks.simulation.roofline import H200, Device

__all__ = ["StepBytes", "StepFloor", "StepShape", "WeightFormat", "step_floor", "weight_formats"]

_HEADS = Path(__file__).parents[1] / "heads"
_UNQUANTIZED = ("lm_head", "mlp.gate", "mlp.router", "embed_tokens")
"""Ends of the names that a format may exclude without a change here: they are plain in every format."""


@dataclass(frozen=True)
class WeightFormat:
    """How a kind of weights is stored, and multiplied."""

    bytes_each: float = 2.0
    """Bytes of a parameter, its share of the scales included."""
    speed: float = 1.0
    """Rate of its GEMMs, by that of bfloat16."""


@dataclass(frozen=True)
class StepShape:
    """A decode step of `rows` requests with `context` tokens each."""

    rows: int
    context: int
    tokens: int = 1
    """Tokens of each request: 1 and its drafts."""
    tp: int = 1
    float8_cache: bool = False
    draft_head: str = ""
    """A configuration of `benchmarks/heads` that makes the drafts."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one GPU moves in a step, by kind."""

    attention: float
    """Weights of the projections around attention."""
    dense: float
    """Weights of dense MLPs, shared experts and routers."""
    experts: float
    """Weights of the experts that run."""
    head: float
    cache: float
    """Keys and values: those of the context are read, those of the new tokens written."""
    drafts: float = 0.0
    """Weights of the draft head, in all of its passes."""

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def weights(self) -> float:
        return self.total - self.cache


@dataclass(frozen=True)
class StepFloor:
    """What one GPU moves and computes in a step, and the seconds of either."""

    moved: StepBytes
    operations: float
    multiply_s: float
    device: Device

    @property
    def move_s(self) -> float:
        return self.moved.total / self.device.bytes_per_s

    @property
    def seconds(self) -> float:
        return max(self.move_s, self.multiply_s)

    @property
    def bound(self) -> str:
        """What takes longer."""
        return "bytes" if self.move_s >= self.multiply_s else "FLOPs"


def step_floor(model: str, step: StepShape, device: Device = H200) -> StepFloor:
    """The floor of a step of a shipped configuration. Raises BenchmarkError for an unknown format."""
    sizes = decoder(model)
    config = _config(config_file(model))
    formats = weight_formats(model, config)
    tokens = step.rows * step.tokens
    touched = sizes.expert_layers * sizes.touched(tokens) * sizes.expert
    attention = sizes.layers * sizes.attention
    head = sizes.shape.hidden * sizes.shape.vocab
    routers = sizes.expert_layers * sizes.shape.hidden * sizes.shape.experts
    dense = sizes.common - attention - head - routers
    drafts = _DraftHead.of(step, sizes)
    visible = _visible(config, sizes.layers, step.context)
    each = _cache_bytes(sizes, step.float8_cache)
    cache = (step.rows * visible + tokens) * each / min(step.tp, sizes.kv_copies_share)
    moved = StepBytes(
        attention * formats["attention"].bytes_each / step.tp,
        (dense * formats["dense"].bytes_each + 2 * routers) / step.tp,
        touched * formats["experts"].bytes_each / step.tp,
        2 * head / step.tp,
        cache,
        2 * drafts.read,
    )
    chosen = sizes.expert_layers * sizes.shape.chosen * sizes.expert
    scores = sizes.attention_flops(tokens * visible, 0)
    parts = [
        (2.0 * attention * tokens, formats["attention"]),
        (2.0 * dense * tokens, formats["dense"]),
        (2.0 * chosen * tokens, formats["experts"]),
        (2.0 * (head + routers) * tokens + scores + 2.0 * drafts.multiplied, WeightFormat()),
    ]
    operations = sum(count for count, _ in parts) / step.tp
    multiply_s = sum(count / kind.speed for count, kind in parts) / step.tp / device.flops
    return StepFloor(moved, operations, multiply_s, device)


def weight_formats(model: str, config: Mapping[str, Any]) -> dict[str, WeightFormat]:
    """Formats of "attention", "dense" and "experts"; others are plain. Raises BenchmarkError."""
    plain = dict.fromkeys(("attention", "dense", "experts"), WeightFormat())
    stated = config.get("quantization_config")
    if stated is None:
        return plain
    match stated:
        case {"quant_method": "mxfp4"}:  # the format of experts alone; a scale of a byte for 32 codes
            return plain | {"experts": WeightFormat(0.5 + 1 / 32)}
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]}:
            if odd := [name for name in _excluded(stated) if not name.endswith(_UNQUANTIZED)]:
                raise BenchmarkError(f"{model}: {', '.join(odd)} are not quantized: add their sizes here")
            # Tensor cores multiply twice as many of 8 bits.
            return dict.fromkeys(plain, WeightFormat(1 + 4 / (rows * columns), 2.0))
        case {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}:
            return dict.fromkeys(plain, WeightFormat(weights["num_bits"] / 8 + 2 / weights["group_size"]))
        case _:
            raise BenchmarkError(
                f"{model}: bytes of a weight in {stated.get('quant_method')} are not known here: add the "
                "format to weight_formats"
            )


def _excluded(stated: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in stated.get("modules_to_not_convert") or []]


def _config(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _visible(config: Mapping[str, Any], layers: int, context: int) -> float:
    """Positions that a token sees, averaged over the layers."""
    kinds = config.get("layer_types") or ["full_attention"] * layers
    window = config.get("sliding_window") or context
    return sum(min(context, window) if kind == "sliding_attention" else context for kind in kinds) / layers


def _cache_bytes(sizes: Decoder, float8: bool) -> float:
    """Bytes of a token over all layers; with float8 a value has one byte, and a head a float32 scale."""
    if not float8:
        return sizes.kv_bytes
    if sizes.shape.latent is not None:
        raise BenchmarkError(f"{sizes.name}: bytes of latents in a float8 cache are not known here")
    return sizes.layers * 2 * sizes.shape.kv_heads * (sizes.shape.head_dim + 4)


@dataclass(frozen=True)
class _DraftHead:
    """Parameters that an EAGLE-3 head reads, and multiplies with tokens, in a step.

    Its first pass takes all tokens of the model's step and their hidden states of three layers, later ones
    the draft before.
    """

    read: int = 0
    multiplied: int = 0

    @classmethod
    def of(cls, step: StepShape, sizes: Decoder) -> "_DraftHead":
        if not step.draft_head:
            return cls()
        config = _config(_HEADS / step.draft_head / "config.json")
        shape = ModelShape.from_config(config)
        into = 3 * sizes.shape.hidden * shape.hidden
        qkv = 2 * shape.hidden * shape.qkv  # reads embedding and hidden state side by side
        layer = qkv + shape.heads * shape.head_dim * shape.hidden + 3 * shape.hidden * shape.features
        head = shape.hidden * config["draft_vocab_size"]
        passes = step.tokens - 1
        tokens = step.rows * step.tokens
        later = step.rows * (passes - 1)
        multiplied = into * tokens + layer * (tokens + later) + head * step.rows * passes
        return cls(into + passes * (layer + head), multiplied)
