"""Triton kernels of `sample`: always two launches, without a sort.

A row of V logits is cut into N spans of ids.

  _reduce_spans  one program for several spans of a row: each span's maximum, and its sum of weights
                 if the row has filters, else its best token
  _sample_rows   one program for a row: the best of the spans' tokens; with filters it reads the N
                 maxima, then only the spans that it needs

A weight is exp((logit - maximum of the row) / temperature), or 0 below min-p. The sampled token has
the largest weight / exponential variate, which is the argmax with Gumbel noise. The filters keep the
tokens above a boundary logit, and the first few with that logit ("ties"). The boundary is found by
a search over ranks; a rank is a float's bits as an integer that sorts like the float, without the
low bits that the logits' dtype never sets. A pass of the search counts for several ranks at once
how many tokens, or how much weight, reach them, and reads only spans whose maximum reaches the
lowest rank still possible.

A row's parameters are read in the kernels, so that they may change between replays of a graph. The
split into programs depends on V alone, so a row's sample does not depend on the batch.

In the kernels `row` is (pointer to its logits, vocabulary, maximum logit, 1 / temperature, min_p),
`key` is (seed, sequence, position) and `listed` a pointer with room for N spans, in the order of
their ids. Shapes: N spans of the row, W ranks of a pass, G spans of S ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling.philox import ROUNDS
from atom_ops.ops.sampling.sampling import SAMPLE_TOKEN, SamplingBatch, sample
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_SPAN = tl.constexpr(256)
_SPANS_PER_PROGRAM = tl.constexpr(16)
_SPANS_AT_ONCE = tl.constexpr(16)  # listed spans of one iteration
_WAYS = tl.constexpr(4)  # ranks of a pass; `_amounts` names them
_REDUCE_WARPS = 4
_GREEDY_WARPS = 4
_SAMPLE_WARPS = 16
_UNSET_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

# What a pass of the search counts.
_PEAKS = tl.constexpr(0)
_TOKENS = tl.constexpr(1)
_WEIGHTS = tl.constexpr(2)

# Instead of minus infinity, because inf - inf is NaN.
_LOWEST = tl.constexpr(-3.4e38)
# The reciprocal of a smaller temperature overflows; this one already gives weight to the maximum only.
_MIN_TEMPERATURE = tl.constexpr(1e-30)
_NO_ID = tl.constexpr(0x7FFFFFFF)  # larger than any id
_ROUNDS = tl.constexpr(ROUNDS)
_WORD_STEP = tl.constexpr(2.0**-32)
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)

_COLUMNS = [
    "temperature_R", "top_k_R", "top_p_R", "min_p_R", "seed_R", "sequence_R", "positions_R",
]  # fmt: skip


@triton.jit
def _load_logits(logits, id, vocabulary):
    """float32; minus infinity past the vocabulary."""
    return tl.load(logits + id, mask=id < vocabulary, other=-float("inf")).to(tl.float32)


@triton.jit
def _rank(logit, UNSET: tl.constexpr):
    """int64 that sorts like the logits; equal for both zeros."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> UNSET).to(tl.int64)


@triton.jit
def _logit(rank, UNSET: tl.constexpr):
    key = rank.to(tl.int32) << UNSET
    bits = tl.where(key < 0, (key | ((1 << UNSET) - 1)) ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight(row, logit):
    """The weight of a logit; 0 for NaN."""
    weight = tl.exp((logit - row[2]) * row[3])
    return tl.where(weight >= row[4], weight, 0.0)


@triton.jit
def token_uniforms(key, span_G, PURPOSE: tl.constexpr):
    """`philox.uniform_` for all tokens of the spans, [G, S]."""
    block_GB = (span_G[:, None] * (_SPAN // 4) + tl.arange(0, _SPAN // 4)[None, :]).to(tl.uint32)
    zero_GB = tl.zeros_like(block_GB)
    first, second, third, fourth = tl.philox(
        key[0], zero_GB + key[2].to(tl.uint32), zero_GB + PURPOSE, zero_GB + key[1].to(tl.uint32), block_GB,
        n_rounds=_ROUNDS,
    )  # fmt: skip
    # Token 4 * block + lane has the word of its lane.
    word_GBJ = tl.join(tl.join(first, third), tl.join(second, fourth))
    word_GS = tl.reshape(word_GBJ, (span_G.shape[0], _SPAN))
    return tl.minimum((word_GS.to(tl.float32) + 0.5) * _WORD_STEP, _LARGEST_BELOW_ONE)


@triton.jit
def _exponential(key, span_G, PURPOSE: tl.constexpr):
    """-log(1 - u) of all tokens of the spans, [G, S]; by its series for small u, where 1 - u rounds."""
    u_GS = token_uniforms(key, span_G, PURPOSE)
    series_GS = u_GS * (1.0 + u_GS * (0.5 + u_GS * (0.33333334 + u_GS * 0.25)))
    return tl.where(u_GS < 0.015625, series_GS, -tl.log(1.0 - u_GS))


@triton.jit
def _has_filter(top_k_R, top_p_R, min_p_R, index):
    top_k, top_p, min_p = tl.load(top_k_R + index), tl.load(top_p_R + index), tl.load(min_p_R + index)
    return (top_k > 0) | (top_p < 1) | (min_p > 0)


@triton.jit
def _store_best(weight_GS, id_GS, span_G, key, scores_N, ids_N, spans, PURPOSE: tl.constexpr):
    """Each span's best token and its score, relative to the span's maximum."""
    score_GS = weight_GS / _exponential(key, span_G, PURPOSE)
    best_G = tl.max(score_GS, 1)
    best_id_G = tl.min(tl.where(score_GS == best_G[:, None], id_GS, _NO_ID), 1)
    tl.store(scores_N + span_G, best_G, mask=span_G < spans)
    tl.store(ids_N + span_G, best_id_G, mask=span_G < spans)


@triton.jit(do_not_specialize=["spans"], do_not_specialize_on_alignment=_COLUMNS)
def _reduce_spans(
    logits, peaks_RN, amounts_RN, listed_RN,
    temperature_R, top_k_R, top_p_R, min_p_R, seed_R, sequence_R, positions_R,
    vocabulary, stride, spans,
    RANDOM: tl.constexpr, FILTERED: tl.constexpr, PURPOSE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(1).to(tl.int64)
    span_G = tl.program_id(0) * _SPANS_PER_PROGRAM + tl.arange(0, _SPANS_PER_PROGRAM)
    id_GS = span_G[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :]
    logits_GS = _load_logits(logits + index * stride, id_GS, vocabulary)
    logits_GS = tl.where(logits_GS == logits_GS, logits_GS, -float("inf"))
    peak_G = tl.max(logits_GS, 1)
    tl.store(peaks_RN + index * spans + span_G, peak_G, mask=span_G < spans)
    if RANDOM:
        temperature = tl.load(temperature_R + index)
        if temperature > 0:
            base_G = tl.maximum(peak_G, _LOWEST)
            inverse_temperature = 1.0 / tl.maximum(temperature, _MIN_TEMPERATURE)
            weight_GS = tl.exp((logits_GS - base_G[:, None]) * inverse_temperature)
            amounts_N, ids_N = amounts_RN + index * spans, listed_RN + index * spans
            key = (tl.load(seed_R + index), tl.load(sequence_R + index), tl.load(positions_R + index))
            if FILTERED:
                if _has_filter(top_k_R, top_p_R, min_p_R, index):
                    tl.store(amounts_N + span_G, tl.sum(weight_GS, 1), mask=span_G < spans)
                else:
                    _store_best(weight_GS, id_GS, span_G, key, amounts_N, ids_N, spans, PURPOSE)
            else:
                _store_best(weight_GS, id_GS, span_G, key, amounts_N, ids_N, spans, PURPOSE)


@triton.jit
def _top1(logits, vocabulary, peak_N, number_N):
    """The smallest id with the maximum logit."""
    top = tl.max(peak_N, 0)
    span = tl.min(tl.where(peak_N == top, number_N, _NO_ID), 0)
    id_S = span * _SPAN + tl.arange(0, _SPAN)
    logit_S = _load_logits(logits, id_S, vocabulary)
    # If all logits are NaN, none equals the maximum.
    return tl.minimum(tl.min(tl.where(logit_S == top, id_S, _NO_ID), 0), vocabulary - 1)


@triton.jit
def _best_of_spans(score_N, ids_N, number_N, spans):
    """The token of the span with the largest score; -1 if all scores are 0."""
    best = tl.max(score_N, 0)
    span = tl.minimum(tl.min(tl.where(score_N == best, number_N, _NO_ID), 0), spans - 1)
    return tl.where(best > 0, tl.load(ids_N + span), -1)


@triton.jit
def _list_spans(listed, peak_N, number_N, least):
    """List the spans whose maximum is at least `least`; returns their number."""
    reached_N = (peak_N >= least) & (peak_N > -float("inf"))
    place_N = tl.cumsum(reached_N.to(tl.int32), 0) - 1
    tl.debug_barrier()  # other threads may still read the previous list
    tl.store(listed + place_N, number_N, mask=reached_N)
    tl.debug_barrier()
    return tl.sum(reached_N.to(tl.int32), 0)


@triton.jit
def _load_listed(row, listed, start, length):
    """The next listed spans, their ids and their logits; minus infinity past the list."""
    entry_G = start + tl.arange(0, _SPANS_AT_ONCE)
    span_G = tl.load(listed + entry_G, mask=entry_G < length, other=tl.cdiv(row[1], _SPAN))
    id_GS = span_G[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :]
    return span_G, id_GS, _load_logits(row[0], id_GS, row[1])


@triton.jit
def _one_of(number_W, which):
    return tl.max(tl.where(tl.arange(0, _WAYS) == which, number_W, -float("inf")), 0)


@triton.jit
def _total(amount_GS):
    return tl.sum(tl.sum(amount_GS, 1).to(tl.float64), 0)


@triton.jit
def _amounts(row, listed, length, logit_W, WHAT: tl.constexpr):
    """Number or weight of the tokens of the listed spans that reach each of the logits: float64 [W].

    Four separate sums, because a dimension of 4 would change the tiles' layout.
    """
    first, second, third, fourth = (
        _one_of(logit_W, 0), _one_of(logit_W, 1), _one_of(logit_W, 2), _one_of(logit_W, 3)
    )  # fmt: skip
    first_GS = tl.zeros((_SPANS_AT_ONCE, _SPAN), tl.float32)
    second_GS, third_GS, fourth_GS = first_GS, first_GS, first_GS
    start = tl.full([], 0, tl.int32)
    _, _, next_GS = _load_listed(row, listed, start, length)
    while start < length:
        logit_GS = next_GS
        start += _SPANS_AT_ONCE
        _, _, next_GS = _load_listed(row, listed, start, length)  # prefetch
        amount_GS = (
            _weight(row, logit_GS) if WHAT == _WEIGHTS else tl.full((_SPANS_AT_ONCE, _SPAN), 1.0, tl.float32)
        )
        first_GS += tl.where(logit_GS >= first, amount_GS, 0.0)
        second_GS += tl.where(logit_GS >= second, amount_GS, 0.0)
        third_GS += tl.where(logit_GS >= third, amount_GS, 0.0)
        fourth_GS += tl.where(logit_GS >= fourth, amount_GS, 0.0)
    way_W = tl.arange(0, _WAYS)
    lower_W = tl.where(way_W == 0, _total(first_GS), _total(second_GS))
    return tl.where(way_W < 2, lower_W, tl.where(way_W == 2, _total(third_GS), _total(fourth_GS)))


@triton.jit
def _between(low, high, by_logit, UNSET: tl.constexpr):
    """W ranks between `low` and `high`, equidistant as ranks or as logits."""
    share_W = tl.arange(0, _WAYS) + 1
    even_W = low + (high - low) * share_W // (_WAYS + 1)
    first = tl.maximum(_logit(low, UNSET), _LOWEST)
    last = _logit(high - 1, UNSET)
    part_W = share_W.to(tl.float32) / (_WAYS + 1)
    rank_W = tl.where(by_logit, _rank(first * (1 - part_W) + last * part_W, UNSET), even_W)
    return tl.minimum(tl.maximum(rank_W, low + 1), high - 1)


@triton.jit
def _boundary(row, listed, peak_N, number_N, wanted, low, high, WHAT: tl.constexpr, UNSET: tl.constexpr):
    """The largest rank whose amount (of all tokens that reach it) is at least `wanted`, or `low`.

    The amount of `high` must be less than `wanted`. Also returns the amount above the rank found.
    """
    above = tl.full([], 0.0, tl.float64)
    # Steps by logit converge faster, steps by rank are sure to end: alternate.
    by_logit = tl.full([], 1, tl.int1)
    while low + 1 < high:
        rank_W = _between(low, high, by_logit, UNSET)
        logit_W = _logit(rank_W, UNSET)
        if WHAT == _PEAKS:
            amount_W = tl.sum((peak_N[None, :] >= logit_W[:, None]).to(tl.int32), 1).to(tl.float64)
        else:
            length = _list_spans(listed, peak_N, number_N, _logit(low, UNSET))
            amount_W = _amounts(row, listed, length, logit_W, WHAT)
        enough_W = amount_W >= wanted
        above = tl.maximum(above, tl.max(tl.where(enough_W, 0.0, amount_W), 0))
        high = tl.minimum(high, tl.min(tl.where(enough_W, high, rank_W), 0))
        low = tl.maximum(low, tl.max(tl.where(enough_W, rank_W, low), 0))
        by_logit = by_logit == 0
    return low, above


@triton.jit
def _sample_listed(row, key, listed, length, boundary, ties, PURPOSE: tl.constexpr):
    """Sample among the listed tokens above the boundary and the first ties; -1 if all weights are 0."""
    best = tl.full([], 0.0, tl.float32)
    best_id = tl.full([], -1, tl.int32)
    start = tl.full([], 0, tl.int32)
    seen = tl.full([], 0.0, tl.float64)
    while start < length:
        span_G, id_GS, logit_GS = _load_listed(row, listed, start, length)
        kept_GS = logit_GS > boundary
        equal_GS = (logit_GS == boundary).to(tl.int32)
        equal = tl.sum(tl.sum(equal_GS, 1), 0)
        if equal > 0:
            order_T = tl.cumsum(tl.reshape(equal_GS, (_SPANS_AT_ONCE * _SPAN,)), 0)
            order_GS = tl.reshape(order_T, (_SPANS_AT_ONCE, _SPAN)).to(tl.float64) + seen
            kept_GS = kept_GS | ((equal_GS > 0) & (order_GS <= ties))
        weight_GS = tl.where(kept_GS, _weight(row, logit_GS), 0.0)
        score_GS = weight_GS / _exponential(key, span_G, PURPOSE)
        score = tl.max(tl.max(score_GS, 1), 0)
        id = tl.min(tl.min(tl.where(score_GS == score, id_GS, _NO_ID), 1), 0)
        # Spans are listed in the order of their ids, so that ties go to the smallest id.
        best_id = tl.where(score > best, id, best_id)
        best = tl.maximum(best, score)
        seen += equal.to(tl.float64)
        start += _SPANS_AT_ONCE
    return best_id


@triton.jit
def _mass_above(row, listed, peak_N, number_N, rank, UNSET: tl.constexpr):
    logit = _logit(rank + 1, UNSET)
    length = _list_spans(listed, peak_N, number_N, logit)
    logit_W = logit + tl.zeros((_WAYS,), tl.float32)
    return tl.max(_amounts(row, listed, length, logit_W, _WEIGHTS), 0)


@triton.jit
def _sample_filtered(
    row, key, listed, peak_N, number_N, mass, top_k, top_p, PURPOSE: tl.constexpr, UNSET: tl.constexpr
):
    """Sample among the tokens that min-p, top-k and top-p keep; -1 if all weights are 0."""
    vocabulary = row[1]
    top = row[2]
    min_p = row[4]
    # A lower bound of the boundary: min-p, or a weight too small to be sampled.
    least = (tl.log(tl.maximum(min_p, 1e-30)) - 0.01) / row[3]
    rank = _rank(tl.maximum(top + least, _LOWEST), UNSET) - 1
    high = _rank(top, UNSET) + 1
    ties = tl.full([], 0.0, tl.float64)
    by_count = (top_k > 0) & (top_k < vocabulary)
    if by_count:
        # At least k tokens reach the k-th largest span maximum.
        wanted = top_k.to(tl.float64)
        rank, _ = _boundary(row, listed, peak_N, number_N, wanted, rank, high, _PEAKS, UNSET)
        rank, above = _boundary(row, listed, peak_N, number_N, wanted, rank, high, _TOKENS, UNSET)
        ties = wanted - above
    if by_count | (min_p > 0):
        above = _mass_above(row, listed, peak_N, number_N, rank, UNSET)
        mass = above + ties * _weight(row, _logit(rank, UNSET))
    if top_p < 1:
        wanted = top_p.to(tl.float64) * mass
        # All tokens with smaller weights have less than (1 - p) of the mass together.
        least = tl.log(((1.0 - top_p.to(tl.float64)) * mass / vocabulary).to(tl.float32)) - 0.01
        low = tl.maximum(rank, _rank(tl.maximum(top + least / row[3], _LOWEST), UNSET))
        last, above = _boundary(row, listed, peak_N, number_N, wanted, low, high, _WEIGHTS, UNSET)
        each = _weight(row, _logit(last, UNSET)).to(tl.float64)
        needed = tl.maximum(tl.ceil((wanted - above) / tl.maximum(each, 1e-300)), 1.0)
        ties = tl.where(last > rank, needed, tl.minimum(needed, ties))
        rank = last
    boundary = _logit(rank, UNSET)
    length = _list_spans(listed, peak_N, number_N, boundary)
    return _sample_listed(row, key, listed, length, boundary, ties, PURPOSE)


@triton.jit(do_not_specialize=["spans"], do_not_specialize_on_alignment=_COLUMNS)
def _sample_rows(
    logits, peaks_RN, amounts_RN, listed_RN,
    temperature_R, top_k_R, top_p_R, min_p_R, seed_R, sequence_R, positions_R, sampled_R,
    vocabulary, stride, spans,
    RANDOM: tl.constexpr, FILTERED: tl.constexpr, PURPOSE: tl.constexpr, UNSET: tl.constexpr,
    SPANS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    logits += index * stride
    number_N = tl.arange(0, SPANS)
    peak_N = tl.load(peaks_RN + index * spans + number_N, mask=number_N < spans, other=-float("inf"))
    sampled = _top1(logits, vocabulary, peak_N, number_N)
    if RANDOM:
        temperature = tl.load(temperature_R + index)
        if temperature > 0:
            top = tl.maximum(tl.max(peak_N, 0), _LOWEST)
            inverse_temperature = 1.0 / tl.maximum(temperature, _MIN_TEMPERATURE)
            amount_N = tl.load(amounts_RN + index * spans + number_N, mask=number_N < spans, other=0.0)
            scale_N = tl.exp((peak_N - top) * inverse_temperature)
            listed = listed_RN + index * spans
            if FILTERED:
                if _has_filter(top_k_R, top_p_R, min_p_R, index):
                    row = (logits, vocabulary, top, inverse_temperature, tl.load(min_p_R + index))
                    key = (tl.load(seed_R + index), tl.load(sequence_R + index), tl.load(positions_R + index))
                    mass = tl.sum(amount_N.to(tl.float64) * scale_N.to(tl.float64), 0)
                    random = _sample_filtered(
                        row, key, listed, peak_N, number_N, mass,
                        tl.load(top_k_R + index), tl.load(top_p_R + index), PURPOSE, UNSET,
                    )  # fmt: skip
                else:
                    random = _best_of_spans(amount_N * scale_N, listed, number_N, spans)
            else:
                random = _best_of_spans(amount_N * scale_N, listed, number_N, spans)
            sampled = tl.where(random < 0, sampled, random)
    tl.store(sampled_R + index, sampled.to(tl.int64))


@sample.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda logits_RV, batch, positions_R: (
        logits_RV.dtype in _UNSET_BITS and logits_RV.stride(1) == 1 and len(logits_RV) > 0
    ),
)
def _sample(logits_RV: Tensor, batch: SamplingBatch, positions_R: Tensor) -> Tensor:
    rows, vocabulary = logits_RV.shape
    stride = logits_RV.stride(0)
    spans = triton.cdiv(vocabulary, _SPAN.value)
    random = batch.any_random
    filtered = random and (batch.any_top_k or batch.any_top_p or batch.any_min_p)
    peaks_RN = torch.empty(rows, spans, dtype=torch.float32, device=logits_RV.device)
    amounts_RN = torch.empty_like(peaks_RN) if random else peaks_RN
    listed_RN = torch.empty_like(peaks_RN, dtype=torch.int32) if random else peaks_RN
    sampled_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    columns = (
        batch.temperature_R, batch.top_k_R, batch.top_p_R, batch.min_p_R, batch.seed_R, batch.sequence_R,
        positions_R,
    )  # fmt: skip
    modes = {"RANDOM": random, "FILTERED": filtered, "PURPOSE": SAMPLE_TOKEN}
    _reduce_spans[triton.cdiv(spans, _SPANS_PER_PROGRAM.value), rows](
        logits_RV, peaks_RN, amounts_RN, listed_RN, *columns, vocabulary, stride, spans,
        **modes, num_warps=_REDUCE_WARPS,
    )  # fmt: skip
    # Fixed, so that the sums' order does not depend on other rows.
    warps = _SAMPLE_WARPS if random else _GREEDY_WARPS
    _sample_rows[(rows,)](
        logits_RV, peaks_RN, amounts_RN, listed_RN, *columns, sampled_R, vocabulary, stride, spans,
        **modes, UNSET=_UNSET_BITS[logits_RV.dtype],
        SPANS=max(1024, triton.next_power_of_2(spans)), num_warps=warps,
    )  # fmt: skip
    return sampled_R
