"""AITER's paged cache in the flash layout, [num_blocks, block_size, heads, features], and its attention."""

import torch
from torch import Tensor


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """A token's keys and values go to its slot; a negative slot is skipped."""
    assert kv_cache_dtype == "auto" and slot_mapping.dtype == torch.int64
    assert slot_mapping.shape == key.shape[:1]
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        assert new.dim() == 3 and new.is_contiguous() and new.dtype == cache.dtype
        assert cache.dim() == 4 and cache.shape[2:] == new.shape[1:]
        assert scale.dtype == torch.float32 and scale.shape == (1,)
        kept = slot_mapping >= 0
        cache.flatten(0, 1)[slot_mapping[kept]] = new[kept]


def fused_qk_rope_reshape_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    pos: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    is_neox: bool,
    flash_layout: bool,
    apply_scale: bool,
    output_zeros: bool,
) -> tuple[Tensor, ...]:
    """Queries and keys with RoPE; keys without a slot stay NaN. Reads all but the caches by strides."""
    assert is_neox and flash_layout and not apply_scale and not output_zeros
    width = q.shape[2]
    assert width.bit_count() == 1 and key_cache.shape[1].bit_count() == 1 and key_cache.dtype != torch.float16
    assert q.dtype == k.dtype == v.dtype == key_cache.dtype == value_cache.dtype
    assert len(q) == len(k) == len(v) == len(slot_mapping) == len(pos)
    assert k.shape == v.shape and key_cache.shape == value_cache.shape
    assert key_cache.is_contiguous() and value_cache.is_contiguous()
    assert key_cache.shape[2:] == k.shape[1:] and q.shape[1] % k.shape[1] == 0
    assert cos.shape[-1] == sin.shape[-1] == width // 2 and cos.stride() == sin.stride()
    assert slot_mapping.dtype == pos.dtype == torch.int64 and k_scale.shape == v_scale.shape == (1,)
    cos, sin = cos[pos, None], sin[pos, None]
    rotated = []
    for heads in (q, k):
        first, second = heads.float().chunk(2, -1)
        parts = first * cos - second * sin, second * cos + first * sin
        rotated.append(torch.cat(parts, -1).to(q.dtype))
    kept = slot_mapping >= 0
    for new, cache in ((rotated[1], key_cache), (v, value_cache)):
        cache.flatten(0, 1)[slot_mapping[kept]] = new[kept]
    rotated[1][~kept] = torch.nan
    return *rotated, key_cache, value_cache


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """Packed sequences; the causal mask is aligned to the bottom right. What no sequence covers stays NaN."""
    assert causal and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert k.shape[:2] == v.shape[:2] and q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0
    assert k.shape == v.shape or (k.shape[2], v.shape[2]) == (192, 128)
    out = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
    starts_q, starts_k = _starts(cu_seqlens_q), _starts(cu_seqlens_k)
    assert starts_k[-1] <= len(k)
    for row in range(len(starts_q) - 1):
        own, seen = slice(*starts_q[row : row + 2]), slice(*starts_k[row : row + 2])
        assert own.stop - own.start <= max_seqlen_q and seen.stop - seen.start <= max_seqlen_k
        out[own] = _attended(q[own], k[seen], v[seen], softmax_scale, 0, None)
    return out


def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    q_descale: None,
    k_descale: None,
    v_descale: None,
    sinks: Tensor | None = None,
) -> None:
    """Rows of a paged cache; a query sees 1 + window_size[0] tokens, itself included, or all if that is 0."""
    assert causal and softcap == 0 and q_descale is k_descale is v_descale is None
    assert q.is_contiguous() and out.shape == q.shape and out.dtype == q.dtype
    assert k.shape == v.shape and k.dim() == 4 and k.shape[3] == q.shape[2] and k.dtype == q.dtype
    assert seqused_k.dtype == block_table.dtype == torch.int32 and len(seqused_k) == len(block_table)
    assert sinks is None or sinks.shape == q.shape[1:2]
    starts, block_size = _starts(cu_seqlens_q), k.shape[1]
    assert len(starts) == len(seqused_k) + 1
    for row, context in enumerate(seqused_k.tolist()):
        own = slice(*starts[row : row + 2])
        length = own.stop - own.start
        assert length <= max_seqlen_q and context <= max_seqlen_k
        if length == 0:
            continue
        at = torch.arange(context)
        slots = block_table[row].long()[at // block_size] * block_size + at % block_size
        keys, values = k.flatten(0, 1)[slots], v.flatten(0, 1)[slots]
        out[own] = _attended(q[own], keys, values, softmax_scale, 1 + window_size[0], sinks)


def _starts(cumulated: Tensor) -> list[int]:
    assert cumulated.dtype == torch.int32 and cumulated.dim() == 1
    starts: list[int] = cumulated.tolist()
    return starts


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, sinks: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ keys.mT * scale
    at = torch.arange(k.shape[0])
    own = at[k.shape[0] - len(q) :, None]
    hidden = at > own
    if window:
        hidden = hidden | (at <= own - window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.float()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, extra), -1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return (weights @ values).transpose(0, 1).to(q.dtype)
