"""The vision tower of Kimi-K2.5: MoonViT, and the projector to the language model.

    patches ─ patch_embed ─ + pos_emb ─ blocks ─ final_layernorm ─ projector ► features of the image's tokens

A learned grid of positions is interpolated to that of the image, and rotary angles are those of a patch's
column and row, in turns. An image is a video of one frame, which has no position in time.

P patches, in the order of `Pixels`; N tokens of the image, P / merge²; C features of the tower, D of the
language model.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from workers.layers.context import BuildContext
from workers.layers.quantization.config import QuantizationConfig
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

_EPS = 1e-5
_ROPE_THETA = 10000.0
_NAMES = {
    "hidden_size": ("vt_hidden_size", 1152),
    "intermediate_size": ("vt_intermediate_size", 4304),
    "num_attention_heads": ("vt_num_attention_heads", 16),
    "num_hidden_layers": ("vt_num_hidden_layers", 27),
    "pos_emb_height": ("init_pos_emb_height", 64),
    "pos_emb_width": ("init_pos_emb_width", 64),
    "patch_size": ("patch_size", 14),
    "merge_kernel_size": ("merge_kernel_size", (2, 2)),
    "hidden_act": ("hidden_act", "gelu_pytorch_tanh"),
}
"""Names of transformers, those of the published config.json, and defaults."""
_ONLY = {
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "pos_emb_interpolation_mode": "bicubic",
    "norm_type": "layernorm",
}
"""Fields of the published config.json whose other values belong to other towers."""
_REMEDY = "to run the text model alone, add --limit-mm-per-prompt '{\"image\": 0}'"


def moonvit_config(vision: Mapping[str, Any]) -> dict[str, Any]:
    """vision_config with transformers' names. Raises ValueError for what is not supported."""
    for name, value in _ONLY.items():
        if vision.get(name, value) != value:
            raise ValueError(
                f"vision_config with {name} {vision[name]}, not {value}, is not supported; {_REMEDY}"
            )
    made = {name: vision.get(name, vision.get(other, default)) for name, (other, default) in _NAMES.items()}
    merge = made["merge_kernel_size"]
    height, width = (merge, merge) if isinstance(merge, int) else merge
    if height != width:
        raise ValueError(f"vision_config with merge_kernel_size {list(merge)} is not supported; {_REMEDY}")
    return made | {"merge_kernel_size": height}


def _rotated(x_PHE: torch.Tensor, turns_P1F: torch.Tensor) -> torch.Tensor:
    """Neighbouring features are a pair."""
    pairs_PHF = torch.view_as_complex(x_PHE.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs_PHF * turns_P1F).flatten(-2).to(x_PHE.dtype)


class _Block(nn.Module):
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        size = config["hidden_size"]
        self.norm0 = LayerNorm(size, build, _EPS)
        self.norm1 = LayerNorm(size, build, _EPS)
        self.wqkv = WholeLinear(size, 3 * size, build.at("wqkv"))
        self.wo = WholeLinear(size, size, build.at("wo"))
        self._heads = config["num_attention_heads"]
        self.mlp = MLP(config, ("fc0", "fc1"), build.at("mlp"))

    def forward(self, x_PC: torch.Tensor, turns_P1F: torch.Tensor) -> torch.Tensor:
        qkv_PO = self.wqkv(self.norm0(x_PC))
        q_PHE, k_PHE, v_PHE = qkv_PO.unflatten(1, (3, self._heads, -1)).unbind(1)
        q_PHE, k_PHE = (_rotated(each, turns_P1F) for each in (q_PHE, k_PHE))
        x_PC = x_PC + self.wo(attend(q_PHE, k_PHE, v_PHE))
        return x_PC + self.mlp(self.norm1(x_PC))


class _PatchEmbed(nn.Module):
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        size, patch = config["hidden_size"], config["patch_size"]
        self.proj = Table((size, 3, patch, patch), build, with_bias=True)
        self.pos_emb = Table((config["pos_emb_height"], config["pos_emb_width"], size), build)

    def forward(
        self, patches_PCX: torch.Tensor, grid: tuple[int, int], places: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        weight, bias = self.proj.weight, self.proj.bias
        x_PC = functional.linear(patches_PCX.flatten(1).to(weight.dtype), weight.flatten(1), bias)
        learned_1CHW = self.pos_emb.weight.float().permute(2, 0, 1)[None]
        if learned_1CHW.shape[2:] != grid:
            learned_1CHW = functional.interpolate(learned_1CHW, size=grid, mode="bicubic")
        rows_P, columns_P = places
        return x_PC + learned_1CHW[0, :, rows_P, columns_P].T.to(x_PC.dtype)


class _Projector(nn.Module):
    """Maps the patches of each token to features of the language model."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, eps: float, build: BuildContext):
        super().__init__()
        size = config["hidden_size"]
        self._width = size * config["merge_kernel_size"] ** 2
        self.pre_norm = LayerNorm(size, build, eps)
        self.proj = nn.ModuleDict(
            {
                "0": WholeLinear(self._width, self._width, build.at("proj.0")),
                "2": WholeLinear(self._width, hidden_size, build.at("proj.2")),
            }
        )

    def forward(self, x_PC: torch.Tensor) -> torch.Tensor:
        merged_NW = self.proj["0"](self.pre_norm(x_PC).view(-1, self._width))
        features_ND: torch.Tensor = self.proj["2"](functional.gelu(merged_NW))
        return features_ND


class MoonVitTower(VisionTower):
    """Every rank has all of it and encodes every image. Checkpoints do not quantize it."""

    num_levels = 1

    def __init__(self, vision: Mapping[str, Any], hidden_size: int, build: BuildContext, eps: float):
        """`vision` is vision_config, `eps` the projector's. Raises ValueError for what is not supported."""
        super().__init__()
        config = moonvit_config(vision)
        build = replace(build, quantization=QuantizationConfig())
        self._merge = config["merge_kernel_size"]
        self.patch_embed = _PatchEmbed(config, build.at("patch_embed"))
        self.blocks = nn.ModuleList(
            _Block(config, build.at(f"blocks.{number}")) for number in range(config["num_hidden_layers"])
        )
        self.final_layernorm = LayerNorm(config["hidden_size"], build, _EPS)
        self.projector = _Projector(config, hidden_size, eps, build.at("projector"))
        spatial = config["hidden_size"] // config["num_attention_heads"] // 2
        steps = torch.arange(0, spatial, 2, dtype=torch.float32) / spatial
        self._frequencies_F = (1.0 / _ROPE_THETA**steps).to(build.device)

    def forward(self, pixels: Pixels, normalised: Normalisation) -> torch.Tensor:
        """Features [N, 1, D] of the tokens of one image."""
        places = patch_places(pixels.grid, self._merge, self._frequencies_F.device)
        x_PC = self.patch_embed(normalised(pixels.patches_PF), pixels.grid, places)
        turns_P1F = self._turns(*places)
        for block in self.blocks:
            x_PC = block(x_PC, turns_P1F)
        return self.projector(self.final_layernorm(x_PC))[:, None]

    def _turns(self, rows_P: torch.Tensor, columns_P: torch.Tensor) -> torch.Tensor:
        """The rotations of all feature pairs of a head, complex numbers [P, 1, F]: by column, by row, …"""
        axes_P2 = torch.stack((columns_P, rows_P), 1).float()
        angles_PF = (self._frequencies_F[:, None] * axes_P2[:, None, :]).flatten(1)
        return torch.polar(torch.ones_like(angles_PF), angles_PF)[:, None]
