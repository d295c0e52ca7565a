"""Between the QKV projection and attention: head norms, RoPE and the write to the KV cache."""

import torch
from torch import Tensor

from atom_ops.native_impl import NEEDS, call, runs_on, takes
from atom_ops.ops.attention.kv_cache import KVLayer
from atom_ops.ops.attention.qkv import HeadNorms, rotate_and_write_kv

_MOST_FEATURES = 256
"""Most features of a head, which a thread holds on its stack."""


def _supports(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: KVLayer,
    slots_T: Tensor,
    norms: HeadNorms | None = None,
) -> bool:
    weights = () if norms is None else (norms.q_weight_E, norms.k_weight_E)
    return (
        cache.scale is None
        and takes(cache.kv, *weights)
        and qkv_TO.dtype == cache.kv.dtype
        and cache.kv.shape[4] <= _MOST_FEATURES
        and cos_T1R.dtype == sin_T1R.dtype == torch.float32
        and qkv_TO.stride(1) == cos_T1R.stride(2) == sin_T1R.stride(2) == 1
        and slots_T.is_contiguous()
    )


@rotate_and_write_kv.provider("native", needs=NEEDS, supported=runs_on, supports=_supports)
def _rotate_and_write_kv(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: KVLayer,
    slots_T: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    kv_heads, width = cache.kv.shape[3:]
    tokens = len(qkv_TO)
    heads = qkv_TO.shape[1] // width - 2 * kv_heads
    q_THE = qkv_TO.new_empty(tokens, heads, width)
    q_weight_E, k_weight_E, eps = (
        (norms.q_weight_E, norms.k_weight_E, norms.eps) if norms is not None else (None, None, 0.0)
    )
    call(
        "rotate_and_write", qkv_TO.dtype, qkv_TO, qkv_TO.stride(0), cos_T1R, sin_T1R, cos_T1R.stride(0),
        sin_T1R.stride(0), q_THE, cache.kv, slots_T, q_weight_E, k_weight_E, tokens, heads, kv_heads, width,
        cos_T1R.shape[-1], eps,
    )  # fmt: skip
    return q_THE
