"""Between the QKV projection and attention: head norms, RoPE and the write to the KV cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.attention.kv_cache import KVLayer, make_kv_layer, write_kv
from atom_ops.ops.attention.rotary import rotary, rotation
from atom_ops.ops.elementwise.norm import rms_norm


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the RMS norms of query and key heads."""

    q_weight_E: Tensor
    k_weight_E: Tensor
    eps: float


def _case(
    tokens: int, heads: int, kv_heads: int, head_dim: int, with_norms: bool, rope_dim: int | None = None
) -> Case:
    """RoPE on the first `rope_dim` features of each head, by default all."""
    width = head_dim if rope_dim is None else rope_dim

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, KVLayer, Tensor, HeadNorms | None]:
        features = (heads + 2 * kv_heads) * head_dim
        qkv = torch.randn(tokens, features + 32, generator=generator).to(dtype)[:, 16:-16]
        angles = torch.rand(tokens, 1, width // 2, generator=generator) * 6.3
        cache = make_kv_layer(-(-tokens // 4) + 1, 4, kv_heads, head_dim, dtype, torch.device("cpu"))
        slots = torch.randperm(tokens + 4, generator=generator)[:tokens]
        weights = torch.rand(2, head_dim, generator=generator).to(dtype)
        norms = HeadNorms(weights[0], weights[1], 1e-6) if with_norms else None
        return qkv, *rotation(angles.cos(), angles.sin()), cache, slots, norms

    return Case(f"{tokens}x{heads}/{kv_heads}x{head_dim}r{width}{'-norms' if with_norms else ''}", make)


@op(
    [
        _case(7, 9, 3, 64, False),
        _case(5, 16, 8, 128, True),
        _case(1, 32, 8, 128, True),
        _case(3, 4, 1, 80, True),
        _case(4, 2, 2, 16, False),
        _case(3, 6, 2, 128, True, 64),
        _case(5, 4, 2, 80, False, 20),
    ]
)
def rotate_and_write_kv(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: KVLayer,
    slots_T: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """The queries with RoPE, [T, H, E]; keys and values are written to the cache.

    A row of `qkv_TO` is H query, K key and K value heads of E features; only the last dimension
    must be contiguous. Queries and keys are normalised if `norms` are given, then get RoPE on all
    or the first features of each head (see `rotary`). Keys and values are stored in the tokens'
    slots (see `write_kv`). The result's heads are contiguous, its tokens need not be.
    """
    kv_heads, head_dim = cache.kv.shape[3:]
    q_THE, k_TKE, v_TKE = rotated_heads(qkv_TO, cos_T1R, sin_T1R, kv_heads, head_dim, norms)
    write_kv(k_TKE, v_TKE, cache, slots_T)
    return q_THE


def rotated_heads(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    kv_heads: int,
    head_dim: int,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, E] and keys [T, K, E], normalised and with RoPE, and values [T, K, E]."""
    heads_TNE = qkv_TO.unflatten(1, (-1, head_dim))
    q_heads = heads_TNE.shape[1] - 2 * kv_heads
    qk_TNE, v_TKE = heads_TNE.split([q_heads + kv_heads, kv_heads], 1)
    if norms is not None:
        q_THE, k_TKE = qk_TNE.split([q_heads, kv_heads], 1)
        normed = rms_norm(q_THE, norms.q_weight_E, norms.eps), rms_norm(k_TKE, norms.k_weight_E, norms.eps)
        qk_TNE = torch.cat(normed, 1)
    q_THE, k_TKE = rotary(qk_TNE, cos_T1R, sin_T1R).split([q_heads, kv_heads], 1)
    return q_THE, k_TKE, v_TKE
