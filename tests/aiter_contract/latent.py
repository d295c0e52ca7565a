"""AITER's attention over latents (MLA): metadata that splits the work, the kernels that follow it.

A work is one row's queries and a range of its pages. The result of a row with one work goes to the output;
those of several go to a workspace and are merged. `work_info_set` has for each work: row, place in the
workspace or -1, first and last query, first and last page, pages of the row after these, padding.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_CUS = 4
_LATENT, _ROPE = 512, 64
_HEADS = 16
_SPLIT = 32
"""Contexts up to this length are one work."""

FNUZ = torch.float8_e4m3fnuz
"""AITER's float8 on an MI300."""

Infos = tuple[tuple[Any, torch.dtype], ...]


def get_mla_metadata_info_v1(
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: bool,
    fast_mode: bool,
) -> Infos:
    """Shapes and dtypes of the six metadata tensors."""
    assert num_head_qo % _HEADS == 0 and kv_dtype in (q_dtype, FNUZ) and q_dtype.itemsize > 1
    assert fast_mode and not is_sparse
    tiles = batch_size * -(-max_seqlen_qo * num_head_qo // (128 if num_head_qo == _HEADS else _HEADS))
    return (
        (2, torch.uint64),
        (_CUS + 1, torch.int32),
        ((2 * tiles + _CUS - 1, 8), torch.int32),
        (tiles + 1, torch.int32),
        ((tiles, 2), torch.int32),
        (2 * tiles, torch.int32),
    )


def get_mla_metadata_v1(
    seqlens_qo_indptr: Tensor,
    seqlens_kv_indptr: Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: Tensor,
    work_indptr: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor,
    reduce_partial_map: Tensor,
    kv_granularity: int,
    max_seqlen_qo: int,
    uni_seqlen_qo: int,
    fast_mode: bool,
    work_info: Tensor | None = None,
    work_info_set: Tensor | None = None,
    kv_last_page_lens: Tensor | None = None,
    page_size: int = 1,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
) -> None:
    """16 N heads count as N rows of 16 heads, which share a context. Fills the metadata tensors."""
    info = work_info if work_info is not None else work_info_set
    assert info is not None and dtype_kv in (dtype_q, FNUZ) and page_size == num_heads_k == 1 and is_causal
    assert kv_last_page_lens is None or kv_last_page_lens.eq(1).all()
    assert fast_mode and kv_granularity == 16 and 1 <= max_seqlen_qo == uni_seqlen_qo <= 4
    ratio, rest = divmod(num_heads_per_head_k, _HEADS)
    assert rest == 0 and 1 <= ratio < 8 and (ratio == 1 or uni_seqlen_qo == 1)
    q_starts, kv_starts = _starts(seqlens_qo_indptr), _starts(seqlens_kv_indptr)
    assert q_starts == list(range(0, q_starts[-1] + 1, uni_seqlen_qo)) and len(q_starts) == len(kv_starts)

    works, partials, finals, ends = [], [], [], [0]
    for row in range((len(kv_starts) - 1) * ratio):
        start, stop = kv_starts[row // ratio : row // ratio + 2]
        queries = row * uni_seqlen_qo, (row + 1) * uni_seqlen_qo
        cut = stop if stop - start <= _SPLIT else start + (stop - start) // 2
        for first, last in [(start, stop)] if cut == stop else [(start, cut), (cut, stop)]:
            place = -1 if cut == stop else len(partials) * uni_seqlen_qo
            works.append([row, place, *queries, first, last, stop - last, 0])
            partials += [] if cut == stop else [place]
        finals.append(queries)
        ends.append(len(partials))
    share = -(-len(works) // _CUS)
    work_metadata_ptrs.copy_(torch.tensor([work_indptr.data_ptr(), info.data_ptr()]).to(torch.uint64))
    work_indptr.copy_(torch.tensor([min(cu * share, len(works)) for cu in range(_CUS + 1)]))
    info[: len(works)] = torch.tensor(works, dtype=torch.int32)
    reduce_indptr.fill_(ends[-1])
    reduce_indptr[: len(ends)] = torch.tensor(ends, dtype=torch.int32)
    reduce_final_map[: len(finals)] = torch.tensor(finals, dtype=torch.int32)
    reduce_partial_map[: len(partials)] = torch.tensor(partials, dtype=torch.int32)


def mla_decode_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    sm_scale: float,
    num_kv_splits: int,
    work_meta_data: Tensor,
    work_indptr: Tensor,
    work_info_set: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor,
    reduce_partial_map: Tensor,
    kv_scale: Tensor | None,
) -> None:
    """Fills `o` [T, H, 512] as the metadata says. A float8 cache has a scale."""
    _check(q, kv_buffer, o, kv_indices, kv_last_page_lens)
    assert (kv_scale is not None) == (kv_buffer.dtype == FNUZ) and work_meta_data.dtype == torch.uint64
    scale = 1.0
    if kv_scale is not None:
        assert kv_scale.dtype == torch.float32 and kv_scale.shape == (1,)
        scale = float(kv_scale)
    assert num_kv_splits == _CUS and isinstance(sm_scale, float)
    pointers = [work_indptr.data_ptr(), work_info_set.data_ptr()]
    assert work_meta_data.tolist() == pointers
    assert _starts(qo_indptr)[-1] == len(q) and _starts(kv_indptr)[-1] <= len(kv_indices)
    assert len(qo_indptr) == len(kv_indptr) == len(kv_last_page_lens) + 1
    heads = q.shape[1]
    assert heads == _HEADS or (heads % _HEADS == 0 and max_seqlen_q == 1)
    assert 1 <= max_seqlen_q <= 4
    q, out = q.view(-1, _HEADS, q.shape[2]), o.view(-1, _HEADS, _LATENT)
    shape = len(reduce_partial_map) * max_seqlen_q, _HEADS
    partial, lse = torch.full((*shape, _LATENT), torch.nan), torch.full(shape, torch.nan)
    for number in range(_starts(work_indptr)[-1]):
        _, place, first, last, start, stop, after, _ = work_info_set[number].tolist()
        assert last - first == max_seqlen_q
        rows = scale * _bits(kv_buffer)[kv_indices[start:stop].long()].view(kv_buffer.dtype).float().flatten(
            1
        )
        found, found_lse = _attended(q[first:last], rows, after, sm_scale)
        if place < 0:
            out[first:last] = found.to(o.dtype)
        else:
            partial[place : place + max_seqlen_q], lse[place : place + max_seqlen_q] = found, found_lse
    _reduce(out, partial, lse, reduce_indptr, reduce_final_map, reduce_partial_map)


def _reduce(
    out: Tensor, partial: Tensor, lse: Tensor, indptr: Tensor, final_map: Tensor, partial_map: Tensor
) -> None:
    ends = _starts(indptr)
    for tile, (start, stop) in enumerate(pairwise(ends)):
        if start == stop:
            continue
        first, last = final_map[tile].tolist()
        places = [slice(at, at + last - first) for at in partial_map[start:stop].tolist()]
        weights = torch.stack([lse[at] for at in places]).softmax(0)
        parts = torch.stack([partial[at] for at in places])
        out[first:last] = (weights[..., None] * parts).sum(0).to(out.dtype)


def mla_prefill_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    sm_scale: float,
) -> None:
    """Fills `o` [T, H, 512]; a row's queries are the last of its context."""
    _check(q, kv_buffer, o, kv_indices, kv_last_page_lens)
    assert q.dtype == kv_buffer.dtype
    assert q.shape[1] in (16, 128) and isinstance(sm_scale, float)
    q_starts, kv_starts = _starts(qo_indptr), _starts(kv_indptr)
    assert len(q_starts) == len(kv_starts) == len(kv_last_page_lens) + 1
    o.fill_(torch.nan)
    for row in range(len(kv_last_page_lens)):
        own, pages = slice(*q_starts[row : row + 2]), slice(*kv_starts[row : row + 2])
        assert own.stop - own.start <= max_seqlen_q
        rows = kv_buffer[kv_indices[pages].long()].flatten(1)
        o[own] = _attended(q[own], rows, 0, sm_scale)[0].to(o.dtype)


def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor
) -> None:
    """[tokens, 512] and [tokens, 64] go to their slots as number / scale; a negative slot is skipped."""
    assert kv_cache_dtype == "fp8" and kv_cache.dtype == FNUZ and kv_cache.is_contiguous()
    assert scale.dtype == torch.float32 and scale.shape == (1,) and slot_mapping.dtype == torch.int64
    assert kv_c.dtype == k_pe.dtype and kv_c.is_contiguous() and k_pe.is_contiguous()
    assert (kv_c.shape[1], k_pe.shape[1]) == (_LATENT, _ROPE) and len(kv_c) == len(k_pe) == len(slot_mapping)
    rows = torch.cat((kv_c, k_pe), 1).float() / scale
    largest = torch.finfo(FNUZ).max
    codes = rows.clamp(-largest, largest).to(FNUZ).view(torch.uint8)
    kept = slot_mapping >= 0
    _bits(kv_cache).flatten(0, 1)[slot_mapping[kept]] = codes[kept]


def _bits(kv_cache: Tensor) -> Tensor:
    """float8 as bytes, which torch can index."""
    return kv_cache.view(torch.uint8) if kv_cache.dtype == FNUZ else kv_cache


def _check(q: Tensor, kv_buffer: Tensor, o: Tensor, kv_indices: Tensor, last_page_lens: Tensor) -> None:
    assert q.dtype == o.dtype != torch.float16 and kv_buffer.dtype in (q.dtype, FNUZ)
    assert q.is_contiguous() and kv_buffer.is_contiguous() and o.is_contiguous()
    assert kv_buffer.shape[1:] == (1, 1, _LATENT + _ROPE) and q.shape[2] == _LATENT + _ROPE
    assert o.shape == (*q.shape[:2], _LATENT)
    assert kv_indices.dtype == last_page_lens.dtype == torch.int32 and last_page_lens.eq(1).all()


def _attended(q_THK: Tensor, rows_SK: Tensor, after: int, scale: float) -> tuple[Tensor, Tensor]:
    """[T, H, 512] and its log-sum-exp; `after` pages of the context follow these."""
    scores_THS = q_THK.float() @ rows_SK.float().mT * scale
    queries, length = len(q_THK), len(rows_SK)
    last_T = torch.arange(queries) + length + after - queries
    scores_THS = scores_THS.masked_fill((torch.arange(length) > last_T[:, None])[:, None], -torch.inf)
    lse_TH = scores_THS.logsumexp(-1)
    weights_THS = scores_THS.sub(lse_TH[..., None]).exp().nan_to_num()
    return weights_THS @ rows_SK[:, :_LATENT].float(), lse_TH


def _starts(cumulated: Tensor) -> list[int]:
    assert cumulated.dtype == torch.int32 and cumulated.dim() == 1
    starts: list[int] = cumulated.tolist()
    return starts
