"""A model whose layers by turns see everything or a window, with sinks, and the same by definition.

Attention alone, in two shapes of heads: what one kind of layer keeps does not fit the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from atom.shared.config.checkpoint import Checkpoint
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, VOCAB
from workers.layers.attention.attention import Attention, KVGroup
from workers.layers.attention.rotary import RotaryEmbedding
from workers.layers.attention.rotation import Rotation
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.embedding import LMHead, VocabEmbedding
from workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from workers.layers.norm import RMSNorm
from workers.layers.weighted import ShardRange, ShardSpec, WeightedLayer

HIDDEN, EPS, BASE = 48, 1e-6, 10000.0
WINDOW = 10


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    width: int
    window: int


WIDE, NARROW = Heads(4, 2, 32, 0), Heads(6, 3, 16, WINDOW)
LAYERS = (NARROW, WIDE, NARROW, WIDE, NARROW)
GROUPS = [KVGroup([1, 3], WIDE.keys, WIDE.width), KVGroup([0, 2, 4], NARROW.keys, NARROW.width, WINDOW)]


class _Layer(WeightedLayer):
    sinks: Tensor | None

    def __init__(self, number: int, build: BuildContext):
        super().__init__()
        heads = LAYERS[number]
        q, kv = (ShardRange.whole(count * heads.width) for count in (heads.queries, heads.keys))
        self.norm = RMSNorm(HIDDEN, EPS, build)
        self.qkv_proj = ColumnParallelLinear(HIDDEN, [q, kv, kv], False, build.at("qkv_proj"))
        self.o_proj = RowParallelLinear(q, HIDDEN, False, build.at("o_proj"))
        self.rotary = RotaryEmbedding(heads.width, {"rope_theta": BASE}, build)
        self.attention = Attention(number, GROUPS)
        if not heads.window:
            self.sinks = None
        else:
            self.add_weight("sinks", [ShardSpec((heads.queries,), 0, ShardRange.whole(heads.queries))], build)

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        qkv_TO, residual_TD = self.qkv_proj.after_norm(self.norm, x_TD, residual_TD)
        return self.o_proj(self.attention(qkv_TO, rotation, ctx, sinks_H=self.sinks)), residual_TD


class AlternatingLM(CausalLM):
    packed_modules_mapping: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        self.embed = VocabEmbedding(VOCAB, HIDDEN, build)
        self.layers = torch.nn.ModuleList(
            _Layer(number, build.at(f"layers.{number}")) for number in range(len(LAYERS))
        )
        self.norm = RMSNorm(HIDDEN, EPS, build)
        self.head = LMHead(VOCAB, HIDDEN, build, None)
        self.kv_groups = GROUPS

    def forward(self, ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        x_TD, residual_TD = self.embed(ids_T), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, layer.rotary(positions_T), ctx)
        return self.norm.add_norm(x_TD, residual_TD)[0]

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        return self.head(hidden_RD)


def random_tensors(seed: int) -> dict[str, Tensor]:
    """The checkpoint. Weights are large enough that tokens differ clearly."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.5) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    def norm() -> Tensor:
        return torch.rand(HIDDEN, generator=generator) + 0.5

    tensors = {"embed.weight": torch.randn(VOCAB, HIDDEN, generator=generator), "norm.weight": norm()}
    tensors["head.weight"] = matrix(VOCAB, HIDDEN)
    for number, heads in enumerate(LAYERS):
        parts = {"q_proj": heads.queries, "k_proj": heads.keys, "v_proj": heads.keys}
        for name, count in parts.items():
            tensors[f"layers.{number}.{name}.weight"] = matrix(count * heads.width, HIDDEN)
        tensors[f"layers.{number}.o_proj.weight"] = matrix(HIDDEN, heads.queries * heads.width, 3.0)
        tensors[f"layers.{number}.norm.weight"] = norm()
        if heads.window:
            tensors[f"layers.{number}.sinks"] = torch.randn(heads.queries, generator=generator) * 2
    return tensors


def save(tensors: dict[str, Tensor], directory: Path) -> Checkpoint:
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint(str(directory), "AlternatingLM", "alternating", {}, "float32", VOCAB, MAX_MODEL_LEN)


def plain_logits(tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [T, V] of a whole sequence at once, each layer by its definition."""
    x_TD = tensors["embed.weight"][ids]
    for number, heads in enumerate(LAYERS):
        own = {name.split(".")[2]: t for name, t in tensors.items() if name.startswith(f"layers.{number}.")}
        normed_TD = _normed(x_TD, own["norm"])
        x_TD = x_TD + _attended(normed_TD, own, heads) @ own["o_proj"].T
    return _normed(x_TD, tensors["norm.weight"]) @ tensors["head.weight"].T


def _normed(x_TD: Tensor, weight_D: Tensor) -> Tensor:
    return x_TD * (x_TD.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight_D


def _attended(x_TD: Tensor, own: dict[str, Tensor], heads: Heads) -> Tensor:
    q_HTE, k_KTE, v_KTE = (
        (x_TD @ own[name].T).unflatten(1, (-1, heads.width)).transpose(0, 1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    group = heads.queries // heads.keys
    k_HTE, v_HTE = (x.repeat_interleave(group, 0) for x in (_turned(k_KTE), v_KTE))
    scores_HTT = _turned(q_HTE) @ k_HTE.mT * heads.width**-0.5
    distance_TT = torch.arange(len(x_TD))[:, None] - torch.arange(len(x_TD))
    hidden_TT = distance_TT < 0
    if heads.window:
        hidden_TT |= distance_TT >= heads.window
    scores_HTT = scores_HTT.masked_fill(hidden_TT, -torch.inf)
    if "sinks" in own:
        sinks_HT1 = own["sinks"][:, None, None].expand(-1, len(x_TD), 1)
        weights_HTT = torch.cat((scores_HTT, sinks_HT1), -1).softmax(-1)[..., :-1]
    else:
        weights_HTT = scores_HTT.softmax(-1)
    return (weights_HTT @ v_HTE).transpose(0, 1).flatten(1)


def _turned(x_HTE: Tensor) -> Tensor:
    tokens, width = x_HTE.shape[1:]
    frequencies = BASE ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(tokens), frequencies)
    one, two = x_HTE.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
