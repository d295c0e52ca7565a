"""Writes to a float8 cache of latents in AITER's format: one scale for all tokens.

On an MI300 AITER's float8 is e4m3fnuz, where the same bits are half of the number in e4m3fn. Its
scale is therefore 2, so that the cache reads the same as e4m3fn with scale 1.

A cache of other dtypes is written by the other providers: they need one launch for norm, RoPE and write,
AITER three.
"""

from functools import cache

import torch
from torch import Tensor

from atom_ops import aiter_impl
from atom_ops.aiter_impl import NEEDS, runs_on, takes
from atom_ops.ops.attention.kv_cache import FP8
from atom_ops.ops.attention.rotary import rotary
from atom_ops.ops.elementwise.norm import rms_norm
from atom_ops.ops.latent.latent_cache import (
    LatentLayer,
    LatentNorms,
    norm_and_write_latents,
    with_shared_scale,
    write_latent,
)

WIDTHS = (512, 64)
"""Features of the latent and of the key with RoPE, for which AITER has decode kernels."""


def _is_mi300(device: torch.device) -> bool:
    return aiter_impl.architecture(device) == "gfx942"


def widths_of(layer: LatentLayer) -> tuple[int, int]:
    return layer.latent_width, layer.rows.shape[2] - layer.latent_width


def float8_rows(layer: LatentLayer) -> Tensor:
    """The cache with the dtype that AITER expects on this GPU."""
    return layer.rows.view(torch.float8_e4m3fnuz if _is_mi300(layer.rows.device) else FP8)


@cache
def shared_scale(device: torch.device) -> Tensor:
    """float32 [1]. Made with the caches, so that graphs that are captured later find it."""
    scale = 2.0 if _is_mi300(device) else 1.0
    return torch.full((1,), scale, dtype=torch.float32, device=device)


def _pack(layer: LatentLayer) -> LatentLayer | None:
    if layer.scale is None or widths_of(layer) != WIDTHS or layer.shard.ranks > 1:
        return None
    shared_scale(layer.rows.device)
    return with_shared_scale(layer)


def _supports(latents: Tensor, layer: LatentLayer) -> bool:
    return layer.shared_scale and takes(latents) and latents.stride(1) == 1


@write_latent.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda latents_TK, weight_C, eps, cos_T1R, sin_T1R, cache, slots_T, interleaved=False: _supports(
        latents_TK, cache
    ),
    pack=_pack,
    batch_invariant=False,
)
def _write_latent(
    latents_TK: Tensor,
    weight_C: Tensor,
    eps: float,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: LatentLayer,
    slots_T: Tensor,
    interleaved: bool = False,
) -> None:
    import aiter

    latent_TC, key_TR = latents_TK.split(widths_of(cache), 1)
    key_T1R = rotary(key_TR.unsqueeze(1), cos_T1R, sin_T1R, interleaved)
    aiter.concat_and_cache_mla(
        kv_c=rms_norm(latent_TC, weight_C, eps).contiguous(),
        k_pe=key_T1R.squeeze(1).contiguous(),
        kv_cache=float8_rows(cache),
        slot_mapping=slots_T,
        kv_cache_dtype="fp8",
        scale=shared_scale(latents_TK.device),
    )


@norm_and_write_latents.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda latents_TN, norms, cos_T1R, sin_T1R, cache, slots_T, interleaved=False: _supports(
        latents_TN, cache
    ),
    batch_invariant=False,
)
def _norm_and_write_latents(
    latents_TN: Tensor,
    norms: LatentNorms,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: LatentLayer,
    slots_T: Tensor,
    interleaved: bool = False,
) -> Tensor:
    q_width = len(norms.q_weight_Q)
    rest_TK = latents_TN[:, q_width:]
    _write_latent(rest_TK, norms.kv_weight_C, norms.eps, cos_T1R, sin_T1R, cache, slots_T, interleaved)
    return rms_norm(latents_TN[:, :q_width], norms.q_weight_Q, norms.eps)
