"""Attention of multi-head latent attention (MLA): decodes and chunks over the cache, whole prompts expanded.

AITER's kernels read the cache as pages of one token, so they share its layout with all other providers:

    cache rows  [num_blocks, block_size, 576]     our slots
    kv_buffer   [num_blocks * block_size, 1, 1, 576], pages named by `kv_indices`

They are compiled for bfloat16 queries, a latent of 512 and a key of 64 features, and 16 heads; decodes also
read a float8 cache with a shared scale (see `latent_cache`). Other numbers of heads are padded to 16, 32 or
64; decodes of one token take 32 and 64 as rows of 16. 128 heads, on a single GPU, are left to the other
providers: the published release has metadata for them that does not fit its kernel. A step of both decodes
and chunks is computed in two parts, since AITER's kernel for chunks does not split contexts.
"""

import inspect
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.aiter_impl import NEEDS, runs_on, takes
from atom_ops.aiter_impl.latent_cache import WIDTHS, float8_rows, shared_scale, widths_of
from atom_ops.ops.attention.attention_plan import AttentionPlan, Ints, plan_attention
from atom_ops.ops.attention.kv_indices import KVIndices, kv_indices
from atom_ops.ops.latent.latent_attention import latent_attention, prompt_attention
from atom_ops.ops.latent.latent_cache import LatentLayer
from atom_ops.transfer import to_device

_HEADS = 16
_MOST_HEADS = 64
_MOST_QUERIES = 4
"""Most queries of a decoding row, drafts included, with `_HEADS` heads; 1 with more heads."""
_KV_GRANULARITY = 16
_MOST_INDICES = 1 << 26
"""Slots of a step's contexts at their bound: 256 MiB."""
_MOST_ROWS = 1024
"""One wave computes the metadata, row after row."""
_PROMPT_WIDTHS = {(64, 64), (128, 128), (192, 128), (256, 256)}
"""Features of a query and of a value."""


@dataclass(frozen=True, slots=True)
class _DecodeMetadata:
    """How a decode's work is split over the GPU; tensors in AITER's formats."""

    kv: KVIndices
    qo_indptr_R1: Tensor
    last_page_lens_R: Tensor
    work_metadata_ptrs: Tensor
    work_indptr: Tensor
    work_info_set: Tensor
    reduce_indptr: Tensor
    reduce_final_map: Tensor
    reduce_partial_map: Tensor


@dataclass(frozen=True)
class _MakeMetadata:
    """Computes the metadata of a plan once for all layers, which have these in common."""

    heads: int
    dtypes: tuple[torch.dtype, torch.dtype]
    """dtypes of the queries and of the cache."""
    block_size: int

    def __call__(self, plan: AttentionPlan) -> _DecodeMetadata:
        return _decode_metadata(plan, self.heads, self.dtypes, self.block_size)


@dataclass(frozen=True)
class _MakeIndices:
    """`kv_indices` of a plan once for all layers."""

    block_size: int

    def __call__(self, plan: AttentionPlan) -> KVIndices:
        return kv_indices(plan, self.block_size)


def _decode_metadata(
    plan: AttentionPlan, heads: int, dtypes: tuple[torch.dtype, torch.dtype], block_size: int
) -> _DecodeMetadata:
    import aiter

    contexts_R = plan.context_lens_R
    rows = len(contexts_R)
    queries = plan.max_query_len
    device = contexts_R.device
    infos = aiter.get_mla_metadata_info_v1(
        batch_size=rows,
        max_seqlen_qo=queries,
        num_head_qo=heads,
        q_dtype=dtypes[0],
        kv_dtype=dtypes[1],
        is_sparse=False,
        fast_mode=True,
    )
    made = _DecodeMetadata(
        plan.derived(_MakeIndices(block_size)),
        # Not the plan's, in which padding rows have no queries: the kernel expects the same of every row.
        torch.arange(rows + 1, dtype=torch.int32, device=device) * queries,
        torch.ones_like(contexts_R),
        *(torch.empty(shape, dtype=kind, device=device) for shape, kind in infos),
    )
    _fill(made, heads, dtypes, queries)
    return made


def _fill(made: _DecodeMetadata, heads: int, dtypes: tuple[torch.dtype, torch.dtype], queries: int) -> None:
    import aiter

    if "kv_last_page_lens" in inspect.signature(aiter.get_mla_metadata_v1).parameters:
        aiter.get_mla_metadata_v1(
            seqlens_qo_indptr=made.qo_indptr_R1,
            seqlens_kv_indptr=made.kv.indptr_R1,
            kv_last_page_lens=made.last_page_lens_R,
            num_heads_per_head_k=heads,
            num_heads_k=1,
            is_causal=True,
            work_metadata_ptrs=made.work_metadata_ptrs,
            work_info_set=made.work_info_set,
            work_indptr=made.work_indptr,
            reduce_indptr=made.reduce_indptr,
            reduce_final_map=made.reduce_final_map,
            reduce_partial_map=made.reduce_partial_map,
            page_size=1,
            kv_granularity=_KV_GRANULARITY,
            max_seqlen_qo=queries,
            uni_seqlen_qo=queries,
            fast_mode=True,
            dtype_q=dtypes[0],
            dtype_kv=dtypes[1],
        )
        return
    aiter.get_mla_metadata_v1(
        seqlens_qo_indptr=made.qo_indptr_R1,
        seqlens_kv_indptr=made.kv.indptr_R1,
        num_heads_per_head_k=heads,
        num_heads_k=1,
        is_causal=True,
        work_metadata_ptrs=made.work_metadata_ptrs,
        work_indptr=made.work_indptr,
        work_info=made.work_info_set,
        reduce_indptr=made.reduce_indptr,
        reduce_final_map=made.reduce_final_map,
        reduce_partial_map=made.reduce_partial_map,
        kv_granularity=_KV_GRANULARITY,
        max_seqlen_qo=queries,
        uni_seqlen_qo=queries,
        fast_mode=True,
    )


def takes_latents(q_THK: Tensor, cache: LatentLayer) -> bool:
    """Whether the kernels read this cache; plans have limits of their own."""
    return (
        takes(q_THK)
        and q_THK.dtype != torch.float16
        and (cache.rows.dtype == q_THK.dtype or cache.shared_scale)
        and widths_of(cache) == WIDTHS
        and cache.rows.is_contiguous()
        and cache.shard.ranks == 1
    )


def takes_decodes(plan: AttentionPlan, heads: int) -> bool:
    """Whether each row of the step decodes, all with as many queries."""
    rows = len(plan.context_lens_R)
    queries = plan.max_query_len
    return (
        rows <= _MOST_ROWS
        and rows * plan.max_context_len <= _MOST_INDICES
        and plan.num_tokens == rows * queries
        and plan.min_query_len == queries
        and heads <= (_MOST_HEADS if queries == 1 else _HEADS)
        and queries <= _MOST_QUERIES
    )


def _takes_chunks(plan: AttentionPlan, heads: int) -> bool:
    """Whether each row of the step is a part of a prompt."""
    return (
        plan.min_query_len > plan.decode_query_len
        and len(plan.context_lens_R) * plan.max_context_len <= _MOST_INDICES
        and (heads <= _HEADS or heads == 128)
        and not plan.has_padding_tokens
    )


def _takes_mixed(plan: AttentionPlan, heads: int) -> bool:
    """Whether the host knows which rows of the step decode and which are parts of prompts."""
    queries = plan.decode_query_len
    return (
        plan.host is not None
        and plan.min_query_len == queries < plan.max_query_len
        and len(plan.context_lens_R) * plan.max_context_len <= _MOST_INDICES
        and heads <= (_MOST_HEADS if queries == 1 else _HEADS)
        and queries <= _MOST_QUERIES
        and not plan.has_padding_tokens
    )


@latent_attention.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda q_THK, cache, plan, scale: (
        takes_latents(q_THK, cache)
        and not plan.split_tokens
        and (
            takes_decodes(plan, q_THK.shape[1])
            or _takes_mixed(plan, q_THK.shape[1])
            or (_takes_chunks(plan, q_THK.shape[1]) and not cache.shared_scale)
        )
    ),
    batch_invariant=False,
)
def _latent_attention(q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float) -> Tensor:
    heads = q_THK.shape[1]
    if _takes_mixed(plan, heads):
        return _attend_parts(q_THK, cache, plan, scale)
    attend = decode_latents if takes_decodes(plan, heads) else _attend_chunks
    out_THC = attend(with_padding_heads(q_THK), cache, plan, scale)
    return out_THC[:, :heads].contiguous()


def with_padding_heads(q_THK: Tensor) -> Tensor:
    """The queries, contiguous, with zeros as further heads up to the next number that kernels take."""
    heads = q_THK.shape[1]
    more = max(_HEADS, 1 << (heads - 1).bit_length()) - heads
    return functional.pad(q_THK, (0, 0, 0, more)) if more else q_THK.contiguous()


def _attend_parts(q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float) -> Tensor:
    """Decodes and chunks apart, each by the first provider that takes it."""
    out_THC = q_THK.new_empty(*q_THK.shape[:2], cache.latent_width)
    for part in plan.derived(_parts):
        found = latent_attention(q_THK.index_select(0, part.tokens), cache, part.plan, scale)
        out_THC.index_copy_(0, part.tokens, found)
    return out_THC


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a step."""

    tokens: Tensor
    """int64: their tokens as indices of the step's."""
    plan: AttentionPlan


def _parts(plan: AttentionPlan) -> tuple[_Part, _Part]:
    """The rows that decode, and those with more queries."""
    assert plan.host is not None
    queries = plan.host.query_lens
    decode = plan.decode_query_len
    return _part(plan, np.flatnonzero(queries == decode)), _part(plan, np.flatnonzero(queries > decode))


def _part(plan: AttentionPlan, rows: Ints) -> _Part:
    assert plan.host is not None
    host = plan.host
    device = plan.context_lens_R.device
    queries = host.query_lens[rows]
    first_tokens = (host.query_lens.cumsum() - host.query_lens)[rows]
    tokens = np.arange(queries.sum()) + np.repeat(first_tokens - (queries.cumsum() - queries), queries)
    own = replace(
        host, query_lens=queries, context_lens=host.context_lens[rows], block_table=host.block_table[rows]
    )
    made = plan_attention(
        own.query_lens, own.context_lens, own.block_table, device, decode_query_len=plan.decode_query_len
    )
    contexts_R = plan.context_lens_R.index_select(0, to_device(rows, device))
    return _Part(to_device(tokens, device), replace(made, context_lens_R=contexts_R, host=own))


def decode_latents(q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float) -> Tensor:
    """[T, H, C] for 16, 32 or 64 heads. A row without context gets the value of slot 0."""
    from aiter.mla import mla_decode_fwd

    heads = q_THK.shape[1]
    block_size = cache.rows.shape[1]
    pages = _pages(cache)
    made = plan.derived(_MakeMetadata(heads, (q_THK.dtype, pages.dtype), block_size))
    out_THC = q_THK.new_empty(*q_THK.shape[:2], cache.latent_width)
    mla_decode_fwd(
        q=q_THK,
        kv_buffer=pages,
        o=out_THC,
        qo_indptr=made.qo_indptr_R1,
        kv_indptr=made.kv.indptr_R1,
        kv_indices=made.kv.indices_S,
        kv_last_page_lens=made.last_page_lens_R,
        max_seqlen_q=plan.max_query_len,
        sm_scale=scale,
        # Without it a later release may choose its own splits, in a tensor that graphs cannot share.
        num_kv_splits=len(made.work_indptr) - 1,
        work_meta_data=made.work_metadata_ptrs,
        work_indptr=made.work_indptr,
        work_info_set=made.work_info_set,
        reduce_indptr=made.reduce_indptr,
        reduce_final_map=made.reduce_final_map,
        reduce_partial_map=made.reduce_partial_map,
        kv_scale=shared_scale(q_THK.device) if cache.shared_scale else None,
    )
    return out_THC


def _attend_chunks(q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float) -> Tensor:
    from aiter.mla import mla_prefill_fwd

    kv = plan.derived(_MakeIndices(cache.rows.shape[1]))
    out_THC = q_THK.new_empty(*q_THK.shape[:2], cache.latent_width)
    mla_prefill_fwd(
        q=q_THK,
        kv_buffer=_pages(cache),
        o=out_THC,
        qo_indptr=plan.query_starts_R1,
        kv_indptr=kv.indptr_R1,
        kv_indices=kv.indices_S,
        kv_last_page_lens=torch.ones_like(plan.context_lens_R),
        max_seqlen_q=plan.max_query_len,
        sm_scale=scale,
    )
    return out_THC


def _pages(cache: LatentLayer) -> Tensor:
    """[pages, page_size, kv_heads, features], with pages of one token."""
    rows = float8_rows(cache) if cache.shared_scale else cache.rows
    return rows.view(-1, 1, 1, rows.shape[2])


@prompt_attention.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda q_THE, k_THE, v_THV, plan, scale: (
        takes(q_THE, k_THE, v_THV)
        and (q_THE.shape[2], v_THV.shape[2]) in _PROMPT_WIDTHS
        and not plan.has_padding_tokens
    ),
    batch_invariant=False,
)
def _prompt_attention(
    q_THE: Tensor, k_THE: Tensor, v_THV: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    import aiter

    out_THV: Tensor = aiter.flash_attn_varlen_func(
        q=q_THE.contiguous(),
        k=k_THE.contiguous(),
        v=v_THV.contiguous(),
        cu_seqlens_q=plan.query_starts_R1,
        cu_seqlens_k=plan.query_starts_R1,
        max_seqlen_q=plan.max_query_len,
        max_seqlen_k=plan.max_query_len,
        softmax_scale=scale,
        causal=True,
    )
    return out_THV
