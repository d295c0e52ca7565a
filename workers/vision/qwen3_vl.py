"""The vision tower of Qwen3-VL and Qwen3.5.

    patches ─ patch_embed ─ + pos_embed ─ blocks ─┬─ … ─ blocks ─ merger ► features of the image's tokens
                                                  └─ deepstack mergers   ► added after the first layers

A learned grid of positions is interpolated to that of the image, and rotary angles are those of a patch's row
and column. An image is a video of one frame, which fills `temporal_patch_size` frames.

P patches, in the order of `Pixels`; N tokens of the image, P / merge²; C features of the tower, D of the
language model, S deepstack mergers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from workers.layers.context import BuildContext
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

_ROPE_THETA = 10000.0


class _Attention(nn.Module):
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        size = config["hidden_size"]
        self._heads = config["num_heads"]
        self.qkv = WholeLinear(size, 3 * size, build.at("qkv"))
        self.proj = WholeLinear(size, size, build.at("proj"))

    def forward(self, x_PC: torch.Tensor, cos_P1E: torch.Tensor, sin_P1E: torch.Tensor) -> torch.Tensor:
        q_PHE, k_PHE, v_PHE = self.qkv(x_PC).unflatten(1, (3, self._heads, -1)).unbind(1)
        q_PHE, k_PHE = (_rotated(each, cos_P1E, sin_P1E) for each in (q_PHE, k_PHE))
        return self.proj(attend(q_PHE, k_PHE, v_PHE))


def _rotated(x_PHE: torch.Tensor, cos_P1E: torch.Tensor, sin_P1E: torch.Tensor) -> torch.Tensor:
    first, second = x_PHE.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x_PHE.float() * cos_P1E + turned * sin_P1E).to(x_PHE.dtype)


class _Block(nn.Module):
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        self.norm1 = LayerNorm(config["hidden_size"], build)
        self.norm2 = LayerNorm(config["hidden_size"], build)
        self.attn = _Attention(config, build.at("attn"))
        self.mlp = MLP(config, ("linear_fc1", "linear_fc2"), build.at("mlp"))

    def forward(self, x_PC: torch.Tensor, cos_P1E: torch.Tensor, sin_P1E: torch.Tensor) -> torch.Tensor:
        x_PC = x_PC + self.attn(self.norm1(x_PC), cos_P1E, sin_P1E)
        return x_PC + self.mlp(self.norm2(x_PC))


class _Merger(nn.Module):
    """Maps the patches of each token to features of the language model."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext, norms_token: bool):
        """`norms_token`: the norm is over all patches of a token, not over each."""
        super().__init__()
        size = config["hidden_size"]
        self._width = size * config["spatial_merge_size"] ** 2
        self._norms_token = norms_token
        self.norm = LayerNorm(self._width if norms_token else size, build)
        self.linear_fc1 = WholeLinear(self._width, self._width, build.at("linear_fc1"))
        self.linear_fc2 = WholeLinear(self._width, config["out_hidden_size"], build.at("linear_fc2"))

    def forward(self, x_PC: torch.Tensor) -> torch.Tensor:
        x_NW = x_PC.view(-1, self._width)
        normed_NW = self.norm(x_NW) if self._norms_token else self.norm(x_PC).view(-1, self._width)
        return self.linear_fc2(functional.gelu(self.linear_fc1(normed_NW)))


class _PatchEmbed(nn.Module):
    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        self._frames = config.get("temporal_patch_size", 2)
        patch = config["patch_size"]
        shape = (config["hidden_size"], config.get("in_channels", 3), self._frames, patch, patch)
        self.proj = Table(shape, build, with_bias=True)

    def forward(self, patches_PCX: torch.Tensor) -> torch.Tensor:
        weight, bias = self.proj.weight, self.proj.bias
        frames_PF = patches_PCX.to(weight.dtype).unsqueeze(2).expand(-1, -1, self._frames, -1).flatten(1)
        return functional.linear(frames_PF, weight.flatten(1), bias)


class Qwen3VLTower(VisionTower):
    """The modules of the checkpoint, `visual`. Every rank has all of it and encodes every image."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, build: BuildContext):
        """`config` is vision_config; raises KeyError or ValueError for what is not supported."""
        super().__init__()
        if config["out_hidden_size"] != hidden_size:
            raise ValueError(
                f"vision_config.out_hidden_size is {config['out_hidden_size']}, and the language model has "
                f"{hidden_size} features"
            )
        size = config["hidden_size"]
        self._merge = config.get("spatial_merge_size", 2)
        self._side = int(config["num_position_embeddings"] ** 0.5)
        config = {**config, "spatial_merge_size": self._merge}
        self.patch_embed = _PatchEmbed(config, build)
        self.pos_embed = Table((config["num_position_embeddings"], size), build)
        blocks = range(config["depth"])
        self.blocks = nn.ModuleList(_Block(config, build.at(f"blocks.{number}")) for number in blocks)
        self.merger = _Merger(config, build.at("merger"), norms_token=False)
        self._after = list(config.get("deepstack_visual_indexes", ()))
        self.deepstack_merger_list = nn.ModuleList(
            _Merger(config, build.at(f"deepstack_merger_list.{number}"), norms_token=True)
            for number in range(len(self._after))
        )
        theta = (config.get("rope_parameters") or {}).get("rope_theta", _ROPE_THETA)
        spatial = size // config["num_heads"] // 2
        steps = torch.arange(0, spatial, 2, dtype=torch.float32) / spatial
        self._frequencies_F = (1.0 / theta**steps).to(build.device)
        self.num_levels = 1 + len(self._after)

    def forward(self, pixels: Pixels, normalised: Normalisation) -> torch.Tensor:
        """Features [N, 1 + S, D] of the tokens of one image."""
        rows_P, columns_P = patch_places(pixels.grid, self._merge, self._frequencies_F.device)
        x_PC = self.patch_embed(normalised(pixels.patches_PF))
        x_PC = x_PC + self._positions(rows_P, columns_P, pixels.grid).to(x_PC.dtype)
        cos_P1E, sin_P1E = self._rotation(rows_P, columns_P)
        levels = []
        for number, block in enumerate(self.blocks):
            x_PC = block(x_PC, cos_P1E, sin_P1E)
            if number in self._after:
                levels.append(self.deepstack_merger_list[self._after.index(number)](x_PC))
        return torch.stack((self.merger(x_PC), *levels), 1)

    def _positions(
        self, rows_P: torch.Tensor, columns_P: torch.Tensor, grid: tuple[int, int]
    ) -> torch.Tensor:
        """The learned grid of positions at each patch, interpolated between four of its points; float32."""
        whole_PC: torch.Tensor | None = None
        taps = [self._taps(each_P, size) for each_P, size in zip((rows_P, columns_P), grid, strict=True)]
        for row_P, row_weight_P in taps[0]:
            for column_P, column_weight_P in taps[1]:
                point_PC = self.pos_embed.weight[row_P * self._side + column_P].float()
                part_PC = point_PC * (row_weight_P * column_weight_P)[:, None]
                whole_PC = part_PC if whole_PC is None else whole_PC + part_PC
        assert whole_PC is not None
        return whole_PC

    def _taps(self, index_P: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The two points of the learned grid next to each index of an axis, and their weights."""
        at_P = index_P.float() * (self._side - 1) / max(size - 1, 1)
        floor_P = at_P.floor()
        points = [(floor_P.long() + step).clamp(max=self._side - 1) for step in (0, 1)]
        weights = [(1 - (at_P - floor_P - step).abs()).clamp(min=0) for step in (0, 1)]
        return list(zip(points, weights, strict=True))

    def _rotation(self, rows_P: torch.Tensor, columns_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [P, 1, E] of all features of a head."""
        by_axis = [each_P[:, None].float() * self._frequencies_F for each_P in (rows_P, columns_P)]
        angles_PE = torch.cat(by_axis * 2, -1)
        return angles_PE.cos()[:, None], angles_PE.sin()[:, None]
