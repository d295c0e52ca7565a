"""The paged cache of one layer of multi-head latent attention.

Slot s is offset s % block_size of block s // block_size. It holds one row per token, shared by all
heads: the normalised latent, then the key with RoPE.

    rows    [num_blocks, block_size, C + R]     compute dtype, bfloat16 or float8_e4m3fn
    scale   [num_blocks, block_size]            float32, for float8_e4m3fn only

A layer with an indexer has its index keys in the same slots. Where ranks split the cache by tokens
(`token_shard`), ops take the slots that count all ranks, and each rank stores its own tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.attention.kv_cache import (
    FP8,
    FP8_MAX,
    float8_codes,
    float8_numbers,
    store,
    without_padding_rows,
    zeros,
)
from atom_ops.ops.attention.rotary import rotary, rotation
from atom_ops.ops.elementwise.norm import rms_norm
from atom_ops.ops.latent.index_keys import IndexKeys
from atom_ops.ops.sampling.token_shard import ALL_TOKENS, TokenShard
from atom_ops.tolerances import DEFAULT


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """One layer's cache; with scales a value is stored value * scale."""

    rows: Tensor
    latent_width: int
    """C: the first C features of a row are the latent, the others the key with RoPE."""
    scale: Tensor | None = None
    index: IndexKeys | None = None
    """Index keys of a layer with an indexer for sparse attention."""
    shard: TokenShard = ALL_TOKENS
    """The tokens that this rank caches."""
    shared_scale: bool = False
    """Whether every token has scale 1, for kernels that know one scale for the whole cache."""


@dataclass(frozen=True, slots=True)
class LatentNorms:
    """RMS norms of the queries' and the keys' latents."""

    q_weight_Q: Tensor
    kv_weight_C: Tensor
    eps: float


def make_latent_layer(
    num_blocks: int,
    block_size: int,
    latent_width: int,
    rope_width: int,
    dtype: torch.dtype,
    device: torch.device,
    shard: TokenShard = ALL_TOKENS,
) -> LatentLayer:
    """An empty cache; with float8_e4m3fn one scale per token. `block_size` is that of this rank."""
    shape = (num_blocks, block_size)
    scale = zeros(shape, torch.float32, device) if dtype == FP8 else None
    rows = zeros((*shape, latent_width + rope_width), dtype, device)
    return LatentLayer(rows, latent_width, scale, shard=shard)


def with_shared_scale(cache: LatentLayer) -> LatentLayer:
    """An empty float8 cache whose tokens all have scale 1. `read_latent` reads it as any other."""
    assert cache.scale is not None
    return replace(cache, scale=cache.scale.fill_(1), shared_scale=True)


def latents_of_step(cache: LatentLayer, num_tokens: int) -> LatentLayer:
    """Uninitialised memory for the rows of a step's tokens in the format of `cache`, token t in slot t."""
    rows = cache.rows.new_empty(1, num_tokens, cache.rows.shape[2])
    scale = None if cache.scale is None else cache.scale.new_empty(1, num_tokens)
    return LatentLayer(rows, cache.latent_width, scale)


def keep_latents(step: LatentLayer, cache: LatentLayer, slots_T: Tensor) -> None:
    """Copy this rank's tokens of a step, in `latents_of_step`, to the cache; as `write_latent` does."""
    stored = [(step.rows.flatten(0, 1), cache.rows.flatten(0, 1))]
    if step.scale is not None and cache.scale is not None:
        stored = [(new.view(torch.uint8), old.view(torch.uint8)) for new, old in stored]
        stored.append((step.scale.flatten(), cache.scale.flatten()))
    for new, old in stored:
        _store_own(old, cache.shard, slots_T, new)


def _store_own(stored: Tensor, shard: TokenShard, slots_T: Tensor, new: Tensor) -> None:
    """Store the tokens on this rank."""
    if shard.ranks == 1:
        store(stored, slots_T, new)
    elif len(slots_T):
        slots_T, new = without_padding_rows(stored, shard.own_slots(slots_T), new)
        stored.index_copy_(0, slots_T, new)


def latent_bytes_per_block(block_size: int, latent_width: int, rope_width: int, dtype: torch.dtype) -> int:
    """Bytes of one block of one layer: rows and their scales."""
    scale_bytes = torch.float32.itemsize if dtype == FP8 else 0
    return block_size * ((latent_width + rope_width) * dtype.itemsize + scale_bytes)


def _case(
    tokens: int,
    query: int,
    latent: int,
    rope: int,
    interleaved: bool = True,
    shard: TokenShard = ALL_TOKENS,
) -> Case:
    """`query`: width of the queries' latent before the keys' latent; 0: none."""

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor | LatentLayer | LatentNorms | float | bool, ...]:
        width = query + latent + rope
        latents = (3 * torch.randn(tokens, width + 32, generator=generator)).to(dtype)[:, 16:-16]
        angles = torch.rand(tokens, 1, rope // 2, generator=generator) * 6.3
        cos_sin = rotation(angles.cos(), angles.sin(), interleaved)
        cache = make_latent_layer(-(-tokens // 4) + 1, 4, latent, rope, dtype, torch.device("cpu"), shard)
        slots = torch.randperm(tokens + 4, generator=generator)[:tokens]
        weights = torch.rand(query + latent, generator=generator).to(dtype)
        q_weight, kv_weight = weights.split([query, latent])
        if not query:
            return latents, kv_weight, 1e-6, *cos_sin, cache, slots, interleaved
        return latents, LatentNorms(q_weight, kv_weight, 1e-6), *cos_sin, cache, slots, interleaved

    layout = "interleaved" if interleaved else "halves"
    of_rank = f"-rank{shard.rank}of{shard.ranks}" if shard.ranks > 1 else ""
    return Case(f"{tokens}x{query}+{latent}+{rope}-{layout}{of_rank}", make)


@op(
    [
        _case(1, 0, 512, 64),
        _case(13, 0, 512, 64),
        _case(5, 0, 32, 16, interleaved=False),
        _case(4, 0, 40, 8),
        _case(13, 0, 40, 8, shard=TokenShard(1, 3)),
    ],
    DEFAULT,
)
def write_latent(
    latents_TK: Tensor,
    weight_C: Tensor,
    eps: float,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: LatentLayer,
    slots_T: Tensor,
    interleaved: bool = False,
) -> None:
    """Normalise each token's latent, apply RoPE to its key, and store both in its slot (int64).

    A row of `latents_TK` is the latent (C), then the key (R); only the last dimension must be
    contiguous. The norm is `rms_norm`, RoPE is `rotary`. The float8 scale maps a row's largest
    magnitude to the largest float8; with a shared scale larger numbers than that saturate. Nothing is
    stored for a negative slot (padding), nor for a token of another rank.
    """
    latent_TC, key_TR = latents_TK.split([cache.latent_width, latents_TK.shape[1] - cache.latent_width], 1)
    normed_TC = rms_norm.reference(latent_TC, weight_C, eps)
    rotated_T1R = rotary.reference(key_TR.unsqueeze(1), cos_T1R, sin_T1R, interleaved)
    row_TK = torch.cat((normed_TC, rotated_T1R.squeeze(1)), 1)
    rows = cache.rows.flatten(0, 1)
    if cache.shared_scale:
        row_TK = shared_codes(row_TK)
        rows = rows.view(torch.uint8)
    elif cache.scale is not None:
        row_TK, scale_T = float8_codes(row_TK)
        _store_own(cache.scale.flatten(), cache.shard, slots_T, scale_T)
        rows = rows.view(torch.uint8)
    _store_own(rows, cache.shard, slots_T, row_TK.to(rows.dtype))


def shared_codes(row_TK: Tensor) -> Tensor:
    """float8 codes of scale 1 as uint8; numbers beyond the range saturate.

    -0 becomes 0, since its code is NaN in e4m3fnuz, as which some kernels read them.
    """
    codes = row_TK.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    return codes.masked_fill_(codes == 0x80, 0)


@op(
    [
        _case(1, 1536, 512, 64),
        _case(13, 96, 40, 8),
        _case(5, 24, 32, 16, interleaved=False),
        _case(9, 24, 40, 8, shard=TokenShard(0, 2)),
    ],
    DEFAULT,
    composed=True,
)
def norm_and_write_latents(
    latents_TN: Tensor,
    norms: LatentNorms,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: LatentLayer,
    slots_T: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """The normalised latents of the queries, [T, Q]; latents and keys are written to the cache.

    A row of `latents_TN` is the queries' latent (Q), then a row as for `write_latent` (C + R).
    """
    q_width = len(norms.q_weight_Q)
    rest_TK = latents_TN[:, q_width:]
    write_latent(rest_TK, norms.kv_weight_C, norms.eps, cos_T1R, sin_T1R, cache, slots_T, interleaved)
    return rms_norm(latents_TN[:, :q_width], norms.q_weight_Q, norms.eps)


def read_latent(cache: LatentLayer, slots_S: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of the slots (int64) as `dtype`, [S, C + R]."""
    rows = cache.rows.flatten(0, 1)
    if cache.scale is None:
        return rows.index_select(0, slots_S).to(dtype)
    codes = rows.view(torch.int8).index_select(0, slots_S)
    return float8_numbers(codes, cache.scale.flatten().index_select(0, slots_S), dtype)
