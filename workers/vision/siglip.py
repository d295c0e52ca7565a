"""The vision tower of Gemma 3: SigLIP, and the projector to the language model.

    patches ─ embeddings ─ encoder ─ post_layernorm ─ mean of each token's patches ─ norm ─ matrix ► features

Every image has the size of the learned grid of positions. P patches, in the order of `Pixels`; N tokens of
the image; C features of the tower, D of the language model.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from workers.layers.context import BuildContext
from workers.layers.norm import RMSNorm
from workers.layers.quantization.config import QuantizationConfig
from workers.layers.weighted import ShardRange, ShardSpec, WeightedLayer
from workers.vision.tower import (
    MLP,
    LayerNorm,
    Normalisation,
    Pixels,
    Table,
    VisionTower,
    WholeLinear,
    attend,
    patch_places,
)

_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}


class _Attention(nn.Module):
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        size = config["hidden_size"]
        self._heads = config["num_attention_heads"]
        self.q_proj = WholeLinear(size, size, build.at("q_proj"))
        self.k_proj = WholeLinear(size, size, build.at("k_proj"))
        self.v_proj = WholeLinear(size, size, build.at("v_proj"))
        self.out_proj = WholeLinear(size, size, build.at("out_proj"))

    def forward(self, x_PC: torch.Tensor) -> torch.Tensor:
        q_PHE, k_PHE, v_PHE = (
            each(x_PC).unflatten(1, (self._heads, -1)) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attend(q_PHE, k_PHE, v_PHE))


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        size, eps = config["hidden_size"], config["layer_norm_eps"]
        self.layer_norm1 = LayerNorm(size, build, eps)
        self.layer_norm2 = LayerNorm(size, build, eps)
        self.self_attn = _Attention(config, build.at("self_attn"))
        self.mlp = MLP(config, ("fc1", "fc2"), build.at("mlp"))

    def forward(self, x_PC: torch.Tensor) -> torch.Tensor:
        x_PC = x_PC + self.self_attn(self.layer_norm1(x_PC))
        return x_PC + self.mlp(self.layer_norm2(x_PC))


class _Embeddings(nn.Module):
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        size, patch = config["hidden_size"], config["patch_size"]
        side = config["image_size"] // patch
        self.patch_embedding = Table((size, config["num_channels"], patch, patch), build, with_bias=True)
        self.position_embedding = Table((side**2, size), build)

    def forward(self, patches_PCX: torch.Tensor, places_P: torch.Tensor) -> torch.Tensor:
        """`places_P` are indices of the learned grid of positions."""
        weight, bias = self.patch_embedding.weight, self.patch_embedding.bias
        x_PC = functional.linear(patches_PCX.flatten(1).to(weight.dtype), weight.flatten(1), bias)
        return x_PC + self.position_embedding.weight[places_P]


class _Encoder(nn.Module):
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        self.layers = nn.ModuleList(
            _Layer(config, build.at(f"layers.{number}")) for number in range(config["num_hidden_layers"])
        )

    def forward(self, x_PC: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_PC = layer(x_PC)
        return x_PC


class _Projector(WeightedLayer):
    """Maps the mean of a token's patches to features of the language model."""

    mm_input_projection_weight: torch.Tensor

    def __init__(self, config: Mapping[str, Any], hidden_size: int, build: BuildContext):
        super().__init__()
        size = config["hidden_size"]
        shard = ShardSpec((size, hidden_size), 0, ShardRange.whole(size))
        self.add_weight("mm_input_projection_weight", [shard], build)
        self.mm_soft_emb_norm = RMSNorm(size, config["layer_norm_eps"], build, zero_centred=True)

    def forward(self, x_PC: torch.Tensor, patches: int) -> torch.Tensor:
        """`patches` of a token follow each other."""
        pooled_NC = x_PC.unflatten(0, (-1, patches)).mean(1)
        return self.mm_soft_emb_norm(pooled_NC) @ self.mm_input_projection_weight


class SiglipTower(VisionTower):
    """Every rank has all of it and encodes every image. Checkpoints do not quantize it."""

    num_levels = 1

    def __init__(self, config: Mapping[str, Any], hidden_size: int, build: BuildContext, tokens: int):
        """`config` is vision_config; an image has `tokens`. Raises ValueError for what is not supported."""
        super().__init__()
        config = {**_DEFAULTS, **config}
        build = replace(build, quantization=QuantizationConfig())
        self._side = config["image_size"] // config["patch_size"]
        self._merge = self._side // math.isqrt(tokens)
        self.embeddings = _Embeddings(config, build.at("embeddings"))
        self.encoder = _Encoder(config, build.at("encoder"))
        self.post_layernorm = LayerNorm(config["hidden_size"], build, config["layer_norm_eps"])
        self.projector = _Projector(config, hidden_size, build.at("projector"))

    def forward(self, pixels: Pixels, normalised: Normalisation) -> torch.Tensor:
        """Features [N, 1, D] of the tokens of one image."""
        rows_P, columns_P = patch_places(pixels.grid, self._merge, pixels.patches_PF.device)
        x_PC = self.embeddings(normalised(pixels.patches_PF), rows_P * self._side + columns_P)
        x_PC = self.post_layernorm(self.encoder(x_PC))
        return self.projector(x_PC, self._merge**2)[:, None]
