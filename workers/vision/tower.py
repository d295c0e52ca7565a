"""What every vision tower has in common: layers that all ranks hold whole, and their outputs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from workers.layers.context import BuildContext
from workers.layers.linear import ColumnParallelLinear
from workers.layers.weighted import ShardRange, ShardSpec, WeightedLayer

_GELU = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}


@dataclass(frozen=True, slots=True)
class Pixels:
    """One image as a tower reads it: rows of `merge` x `merge` neighbouring patches, block after block."""

    patches_PF: torch.Tensor
    """uint8: channels x height x width of each patch."""
    grid: tuple[int, int]
    """Patches in a column, patches in a row."""


class VisionTower(nn.Module, ABC):
    """Maps images to features of the language model's tokens."""

    num_levels: int
    """L, features of a token: those of its embedding, and one for each of the first decoder layers."""

    @abstractmethod
    def forward(self, pixels: Pixels, normalised: "Normalisation") -> torch.Tensor:
        """Features [N, L, D] of the N tokens of one image."""


class WholeLinear(ColumnParallelLinear):
    """A linear layer with bias that every tensor-parallel rank computes whole."""

    def __init__(self, in_features: int, out_features: int, build: BuildContext):
        super().__init__(in_features, [ShardRange.whole(out_features)], True, build)


class MLP(nn.Module):
    """Two linear layers, GELU between them."""

    def __init__(self, config: Mapping[str, Any], names: tuple[str, str], build: BuildContext):
        """`config` is vision_config; `names` are those of the layers.

        Raises ValueError for another function.
        """
        super().__init__()
        act = config.get("hidden_act", "gelu_pytorch_tanh")
        if act not in _GELU:
            raise ValueError(
                f"vision_config.hidden_act {act} is not supported; supported: {', '.join(_GELU)}"
            )
        self._approximate = _GELU[act]
        self._names = names
        size, features = config["hidden_size"], config["intermediate_size"]
        self.add_module(names[0], WholeLinear(size, features, build.at(names[0])))
        self.add_module(names[1], WholeLinear(features, size, build.at(names[1])))

    def forward(self, x_PC: torch.Tensor) -> torch.Tensor:
        first, second = (self.get_submodule(name) for name in self._names)
        out_PC: torch.Tensor = second(functional.gelu(first(x_PC), approximate=self._approximate))
        return out_PC


class LayerNorm(WeightedLayer):
    """LayerNorm with weight and bias."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, size: int, build: BuildContext, eps: float = 1e-6):
        super().__init__()
        self._eps = eps
        shard = ShardSpec((size,), 0, ShardRange.whole(size))
        self.add_weight("weight", [shard], build)
        self.add_weight("bias", [shard], build)

    def forward(self, x_PC: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x_PC, self.weight.shape, self.weight, self.bias, self._eps)


class Table(WeightedLayer):
    """A weight of any shape that is used as it is."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, shape: Sequence[int], build: BuildContext, with_bias: bool = False):
        """`with_bias`: also a bias with one number for each row."""
        super().__init__()
        rows = ShardRange.whole(shape[0])
        self.add_weight("weight", [ShardSpec(tuple(shape), 0, rows)], build)
        if with_bias:
            self.add_weight("bias", [ShardSpec((shape[0],), 0, rows)], build)
        else:
            self.bias = None


def attend(q_PHE: torch.Tensor, k_PHE: torch.Tensor, v_PHE: torch.Tensor) -> torch.Tensor:
    """Attention of all patches to each other, heads side by side [P, C]."""
    q_1HPE, k_1HPE, v_1HPE = (each.transpose(0, 1)[None] for each in (q_PHE, k_PHE, v_PHE))
    out_HPE = functional.scaled_dot_product_attention(q_1HPE, k_1HPE, v_1HPE)[0]
    return out_HPE.transpose(0, 1).flatten(1)


def patch_places(
    grid: tuple[int, int], merge: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column [P] of each patch in the image, in the order of `Pixels`."""
    rows, columns = grid
    numbers = torch.arange(rows * columns, device=device).view(rows, columns)
    blocks = numbers.unflatten(0, (-1, merge)).unflatten(2, (-1, merge))
    order_P = blocks.transpose(1, 2).flatten()
    return order_P // columns, order_P % columns


class Normalisation:
    """Maps the bytes of pixels to the numbers that transformers' image processors make of them."""

    def __init__(self, scale: float, mean: Sequence[float], std: Sequence[float], device: torch.device):
        # Rescaled in float64, rounded to float32, normalised in float32.
        levels_L = (torch.arange(256, dtype=torch.float64) * scale).float()
        means_C1 = torch.tensor(mean, dtype=torch.float32)[:, None]
        stds_C1 = torch.tensor(std, dtype=torch.float32)[:, None]
        self._levels_CL = ((levels_L - means_C1) / stds_C1).to(device)

    def __call__(self, patches_PF: torch.Tensor) -> torch.Tensor:
        """Float32 [P, channels, pixels] of uint8 patches."""
        channels = len(self._levels_CL)
        patches_PCX = patches_PF.unflatten(1, (channels, -1))
        parts = [self._levels_CL[number][patches_PCX[:, number].int()] for number in range(channels)]
        return torch.stack(parts, 1)
