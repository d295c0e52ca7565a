"""The paged cache of index keys for sparse attention: one key per token, for all heads of the indexer.

A key is in the slot of its token's latent:

    keys    [num_blocks, block_size, I]     compute dtype, bfloat16 or float8_e4m3fn
    scale   [num_blocks, block_size]        float32, for float8_e4m3fn only
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.ops.attention.kv_cache import FP8, float8_codes, float8_numbers, store, zeros
from atom_ops.ops.attention.rotary import rotary, rotation
from atom_ops.tolerances import DEFAULT


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """One layer's keys; with scales a value is stored value * scale."""

    keys: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexNorm:
    """Layer norm of index keys."""

    weight_I: Tensor
    bias_I: Tensor
    eps: float


def make_index_keys(
    num_blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device
) -> IndexKeys:
    """An empty cache; with float8_e4m3fn one scale per token."""
    shape = (num_blocks, block_size)
    scale = zeros(shape, torch.float32, device) if dtype == FP8 else None
    return IndexKeys(zeros((*shape, width), dtype, device), scale)


def index_bytes_per_block(block_size: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of one block of one layer: keys and their scales."""
    scale_bytes = torch.float32.itemsize if dtype == FP8 else 0
    return block_size * (width * dtype.itemsize + scale_bytes)


def _case(tokens: int, width: int, rope: int, interleaved: bool = False) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, IndexNorm, Tensor, Tensor, IndexKeys, Tensor, bool]:
        x = (3 * torch.randn(tokens, width + 32, generator=generator) + 1).to(dtype)[:, 16:-16]
        weight, bias = torch.rand(2, width, generator=generator).to(dtype)
        angles = torch.rand(tokens, 1, rope // 2, generator=generator) * 6.3
        cos_sin = rotation(angles.cos(), angles.sin(), interleaved)
        keys = make_index_keys(-(-tokens // 4) + 1, 4, width, dtype, torch.device("cpu"))
        slots = torch.randperm(tokens + 4, generator=generator)[:tokens]
        return x, IndexNorm(weight, bias, 1e-6), *cos_sin, keys, slots, interleaved

    layout = "interleaved" if interleaved else "halves"
    return Case(f"{tokens}x{width}r{rope}-{layout}", make)


@op([_case(1, 128, 64), _case(13, 128, 64, interleaved=True), _case(6, 24, 8), _case(5, 16, 16)], DEFAULT)
def write_index_keys(
    x_TI: Tensor,
    norm: IndexNorm,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: IndexKeys,
    slots_T: Tensor,
    interleaved: bool = False,
) -> None:
    """Normalise each token's key, apply RoPE to its first R features, and store it in its slot (int64).

    Only the last dimension of `x_TI` must be contiguous; see `rotary` for cosines and sines. The
    float8 scale maps a key's largest magnitude to the largest float8. Nothing is stored for a
    negative slot (padding).
    """
    weight = norm.weight_I.float()
    bias = norm.bias_I.float()
    normed_TI = functional.layer_norm(x_TI.float(), weight.shape, weight, bias, norm.eps).to(x_TI.dtype)
    key_TI = rotary.reference(normed_TI.unsqueeze(1), cos_T1R, sin_T1R, interleaved).squeeze(1)
    keys = cache.keys.flatten(0, 1)
    if cache.scale is not None:
        key_TI, scale_T = float8_codes(key_TI)
        store(cache.scale.flatten(), slots_T, scale_T)
        keys = keys.view(torch.uint8)
    store(keys, slots_T, key_TI.to(keys.dtype))


def read_index_keys(cache: IndexKeys, slots_S: Tensor) -> Tensor:
    """The keys of the slots (int64) in float32, [S, I]."""
    keys = cache.keys.flatten(0, 1)
    if cache.scale is None:
        return keys.index_select(0, slots_S).float()
    codes = keys.view(torch.int8).index_select(0, slots_S)
    return float8_numbers(codes, cache.scale.flatten().index_select(0, slots_S), torch.float32)
