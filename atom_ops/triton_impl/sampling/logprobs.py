"""Log probabilities: each row is cut into spans, whose results a program for each row joins.

  _reduce_spans  a program for a span: its maximum, its sum of exp(logit - maximum), its number of logits
                 above the token's; and sort keys of the logits where top ids are asked for
  _join_spans    a program for a row: the values of the token and of the top ids, and the token's rank

A key is a logit's bits as an integer that sorts like the logit, then the id counted from the end: keys
are unique, and torch.topk of them gives the lowest of equal ids first. The spans depend on the vocabulary
alone, so a row's values do not depend on the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling.logprobs import TokenLogprobs, token_logprobs
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_SPAN = 4096
_KEYS = 1 << 23
"""Sort keys of one pass: 64 MiB."""


@triton.jit
def _reduce_spans(
    logits, ids_N, peaks_NS, sums_NS, above_NS, keys_NV, vocabulary, stride, spans, SPAN: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    id = span * SPAN + tl.arange(0, SPAN)
    inside = id < vocabulary
    logit = tl.load(logits + row * stride + id, mask=inside, other=-float("inf")).to(tl.float32)
    own = tl.load(logits + row * stride + tl.load(ids_N + row)).to(tl.float32)
    peak = tl.max(tl.where(logit == logit, logit, -float("inf")), 0)
    place = row * spans + span
    tl.store(peaks_NS + place, peak)
    # A span that is minus infinity throughout has no weight; NaN spoils the sum, and so the row.
    tl.store(sums_NS + place, tl.sum(tl.exp(logit - tl.where(peak == -float("inf"), 0.0, peak)), 0))
    tl.store(above_NS + place, tl.sum((logit > own).to(tl.int32), 0))
    if keys_NV is not None:
        bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        key = (bits.to(tl.int64) << 32) | (0xFFFFFFFF - id.to(tl.int64))
        tl.store(keys_NV + row * vocabulary + id, key, mask=inside)


@triton.jit
def _join_spans(
    logits, ids_N, top_NK, peaks_NS, sums_NS, above_NS, ids_NW, values_NW, ranks_N,
    stride, spans, top, SPANS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    inside = span < spans
    peak_S = tl.load(peaks_NS + row * spans + span, mask=inside, other=-float("inf"))
    sum_S = tl.load(sums_NS + row * spans + span, mask=inside, other=0.0)
    above_S = tl.load(above_NS + row * spans + span, mask=inside, other=0)
    peak = tl.max(peak_S, 0)
    total = tl.sum(sum_S * tl.exp(peak_S - peak), 0)
    token = tl.load(ids_N + row)
    k = tl.arange(0, TOP)
    listed = (k > 0) & (k <= top)
    key_K = tl.load(top_NK + row * top + k - 1, mask=listed, other=0)
    id_K = tl.where(k == 0, token, 0xFFFFFFFF - (key_K & 0xFFFFFFFF))
    logit_K = tl.load(logits + row * stride + id_K, mask=k <= top, other=0.0).to(tl.float32)
    place_K = row * (top + 1) + k
    tl.store(ids_NW + place_K, id_K, mask=k <= top)
    tl.store(values_NW + place_K, logit_K - peak - tl.log(total), mask=k <= top)
    tl.store(ranks_N + row, tl.sum(above_S, 0).to(tl.int64) + 1)


@token_logprobs.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda logits_NV, ids_N, top: logits_NV.stride(1) == 1 and len(ids_N) > 0,
)
def _of_rows(logits_NV: Tensor, ids_N: Tensor, top: int) -> TokenLogprobs:
    top = min(top, logits_NV.shape[1])
    size = max(1, _KEYS // logits_NV.shape[1]) if top else len(ids_N)
    slices = zip(logits_NV.split(size), ids_N.split(size), strict=True)
    return TokenLogprobs.joined([_of_slice(logits, ids.contiguous(), top) for logits, ids in slices])


def _of_slice(logits_NV: Tensor, ids_N: Tensor, top: int) -> TokenLogprobs:
    rows, vocabulary = logits_NV.shape
    stride = logits_NV.stride(0)
    device = logits_NV.device
    spans = triton.cdiv(vocabulary, _SPAN)
    peaks_NS, sums_NS = torch.empty(2, rows, spans, device=device)
    above_NS = torch.empty(rows, spans, dtype=torch.int32, device=device)
    keys_NV = torch.empty(rows, vocabulary, dtype=torch.int64, device=device) if top else None
    _reduce_spans[rows, spans](
        logits_NV, ids_N, peaks_NS, sums_NS, above_NS, keys_NV, vocabulary, stride, spans, SPAN=_SPAN
    )
    top_NK = ids_N if keys_NV is None else keys_NV.topk(top).values
    found = TokenLogprobs(
        torch.empty(rows, top + 1, dtype=torch.int64, device=device),
        torch.empty(rows, top + 1, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
    )
    _join_spans[(rows,)](
        logits_NV, ids_N, top_NK, peaks_NS, sums_NS, above_NS, found.ids_NW, found.values_NW, found.ranks_N,
        stride, spans, top, SPANS=triton.next_power_of_2(spans), TOP=triton.next_power_of_2(top + 1),
    )  # fmt: skip
    return found
