"""Triton kernels of `sample`: two launches, whatever the rows need, and no sort.

A row of V logits is cut into N spans of 128 ids.

  survey  one program for 16 spans of a row: each span's largest logit, and the sum of its weights
  draw    one program for a row: looks at the N maxima, then at the few spans that matter

A weight is exp((logit - largest of the row) / temperature). Logits are compared by rank: a float's
bits as an integer that sorts like the float, less the low bits that its dtype never sets.
The kept tokens are those above a boundary rank and the first few at it. The boundary is found by
bisection over ranks. It lies at or above the k-th largest of the spans' maxima, so the spans that
lie below can be left out: the others are the shortlist. For top-p that k is a guess, which is made
larger until the shortlist has enough mass.
The split into programs depends on V alone: a row draws the same in any company.

In the kernels `row` is (pointer to its logits, vocabulary, largest logit, 1 / temperature, min_p).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling import TOKEN_DRAW, SamplingBatch, sample
from atom_ops.triton_impl import NEEDS, runs_on

_SPAN = tl.constexpr(128)
_GROUP = tl.constexpr(16)  # spans that a program holds at a time
_WARPS = 4
_UNSET_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

# Stands in for a maximum of minus infinity, which cannot be subtracted.
_LOWEST = tl.constexpr(-3.4e38)
# Reciprocals of smaller temperatures overflow; only the largest logits have a weight even here.
_COLDEST = tl.constexpr(1e-30)
_FIRST_GUESS = tl.constexpr(64)
_NOTHING = tl.constexpr(0x7FFFFFFF)  # an id that is none; also more ties than there can be


@triton.jit
def _load_logits(logits, id, inside):
    """float32; minus infinity where not inside, and for NaN."""
    logit = tl.load(logits + id, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(logit == logit, logit, -float("inf"))


@triton.jit
def _rank(logit, UNSET: tl.constexpr):
    """int32 that sorts like the logits; both zeros have the same."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> UNSET


@triton.jit
def _logit_of_rank(rank, UNSET: tl.constexpr):
    key = rank << UNSET
    bits = tl.where(key < 0, (key | ((1 << UNSET) - 1)) ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight(row, logit):
    weight = tl.exp((logit - row[2]) * row[3])
    return tl.where(weight < row[4], 0.0, weight)


@triton.jit
def _weight_of_rank(row, rank, UNSET: tl.constexpr):
    return _weight(row, _logit_of_rank(rank, UNSET)).to(tl.float64)


@triton.jit
def _coldness(temperature):
    return 1.0 / tl.maximum(temperature, _COLDEST)


@triton.jit
def _uniform(seed, choice, position, PURPOSE: tl.constexpr):
    """`philox.uniform` of one row."""
    purpose, zero = tl.full([], PURPOSE, tl.uint32), tl.full([], 0, tl.uint32)
    word, _, _, _ = tl.philox(seed, position.to(tl.uint32), purpose, choice.to(tl.uint32), zero)
    return (word >> 8).to(tl.float64) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["spans"])
def _survey(logits, temperature_R, peaks_RN, masses_RN, vocabulary, spans, RANDOM: tl.constexpr):
    index = tl.program_id(1).to(tl.int64)
    span_G = tl.program_id(0) * _GROUP + tl.arange(0, _GROUP)
    id_GS = span_G[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :]
    logits_GS = _load_logits(logits + index * vocabulary, id_GS, id_GS < vocabulary)
    peak_G = tl.max(logits_GS, 1)
    tl.store(peaks_RN + index * spans + span_G, peak_G, mask=span_G < spans)
    if RANDOM:
        temperature = tl.load(temperature_R + index)
        if temperature > 0:
            base_G = tl.maximum(peak_G, _LOWEST)
            weights_GS = tl.exp((logits_GS - base_G[:, None]) * _coldness(temperature))
            tl.store(masses_RN + index * spans + span_G, tl.sum(weights_GS, 1), mask=span_G < spans)


@triton.jit
def _most_likely(logits, vocabulary, peak_N, number_N, spans):
    """The first id that has the largest logit."""
    top = tl.max(peak_N, 0)
    span = tl.minimum(tl.min(tl.where(peak_N == top, number_N, _NOTHING), 0), spans - 1)
    id_S = span * _SPAN + tl.arange(0, _SPAN)
    logits_S = _load_logits(logits, id_S, id_S < vocabulary)
    return tl.minimum(tl.min(tl.where(logits_S == top, id_S, _NOTHING), 0), vocabulary - 1)


@triton.jit
def _first_above(reached, weight, id, target):
    """The first id at which the running sum exceeds the target."""
    return tl.min(tl.where((reached > target) & (weight > 0), id, _NOTHING), 0)


@triton.jit
def _draw_freely(row, share_N, number_N, u, spans):
    """An id among all, or -1 if none has a weight."""
    logits, vocabulary = row[0], row[1]
    reached_N = tl.cumsum(share_N, 0)
    target = u * tl.max(reached_N, 0)
    span = tl.minimum(tl.sum((reached_N <= target).to(tl.int32), 0), spans - 1)
    before = tl.max(tl.where(number_N < span, reached_N, 0.0), 0)

    id_S = span * _SPAN + tl.arange(0, _SPAN)
    weight_S = _weight(row, _load_logits(logits, id_S, id_S < vocabulary))
    reached_S = before + tl.cumsum(weight_S.to(tl.float64), 0)
    found = _first_above(reached_S, weight_S, id_S, target)
    # The sums differ by roundings: stay where the span has an id with weight to give.
    last = tl.max(tl.where(weight_S > 0, id_S, -1), 0)
    return tl.where(found == _NOTHING, last, found)


@triton.jit
def _write_shortlist(shortlist, eligible_N, rank_N, number_N, count, lowest, highest):
    """List, in their order, the eligible spans whose maxima are the `count` largest, or equal to these.

    Returns how many, and the smallest of their ranks; `lowest` where `count` asks for all spans.
    """
    low, high = lowest, highest + 1
    if count < number_N.shape[0]:
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)
            enough = tl.sum((rank_N >= middle).to(tl.int32), 0) >= count
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    chosen_N = eligible_N & (rank_N >= low)
    place_N = tl.cumsum(chosen_N.to(tl.int32), 0) - 1
    tl.debug_barrier()  # a list before may still be read
    tl.store(shortlist + place_N, number_N, mask=chosen_N)
    tl.debug_barrier()
    return tl.sum(chosen_N.to(tl.int32), 0), low


@triton.jit
def _load_listed(row, shortlist, start, length):
    """Logits of the next spans of the shortlist, [_GROUP, _SPAN], and their ids."""
    logits, vocabulary = row[0], row[1]
    entry_G = start + tl.arange(0, _GROUP)
    span_G = tl.load(shortlist + entry_G, mask=entry_G < length, other=0)
    id_GS = span_G[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :]
    return _load_logits(logits, id_GS, (entry_G < length)[:, None] & (id_GS < vocabulary)), id_GS


@triton.jit
def _from_rank(row, shortlist, length, rank, UNSET: tl.constexpr):
    """Count and mass of the shortlist's tokens of this rank or above."""
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    start = tl.full([], 0, tl.int32)
    while start < length:  # interpreted, a range cannot end at a computed number
        logits_GS, _ids = _load_listed(row, shortlist, start, length)
        counted_GS = _rank(logits_GS, UNSET) >= rank
        weights_GS = tl.where(counted_GS, _weight(row, logits_GS), 0.0)
        count += tl.sum(tl.sum(counted_GS.to(tl.int32), 1), 0)
        mass += tl.sum(tl.sum(weights_GS, 1).to(tl.float64), 0)
        start += _GROUP
    return count, mass


@triton.jit
def _boundary(row, shortlist, length, wanted, low, highest, BY_MASS: tl.constexpr, UNSET: tl.constexpr):
    """The largest rank from which on tokens, or their mass, add up to `wanted`, if `low` does.

    Also the count and the mass above that rank, and how many tokens have it.
    """
    high = highest + 1
    count_low, _ = _from_rank(row, shortlist, length, low, UNSET)
    count_high = tl.full([], 0, tl.int32)
    mass_high = tl.full([], 0.0, tl.float64)
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        count, mass = _from_rank(row, shortlist, length, middle, UNSET)
        enough = mass >= wanted if BY_MASS else count >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        count_low = tl.where(enough, count, count_low)
        count_high = tl.where(enough, count_high, count)
        mass_high = tl.where(enough, mass_high, mass)
    return low, count_high, mass_high, count_low - count_high


@triton.jit
def _draw_listed(row, shortlist, length, rank, ties, target, UNSET: tl.constexpr):
    """An id among those above `rank` and the first `ties` at it, or -1 if none has a weight."""
    found = tl.full([], _NOTHING, tl.int32)
    last = tl.full([], -1, tl.int32)
    tied = tl.full([], 0, tl.int32)
    reached = tl.full([], 0.0, tl.float64)
    start = tl.full([], 0, tl.int32)
    while (start < length) & (found == _NOTHING):
        logits_GS, id_GS = _load_listed(row, shortlist, start, length)
        logits_E = tl.reshape(logits_GS, [_GROUP * _SPAN])
        id_E = tl.reshape(id_GS, [_GROUP * _SPAN])
        rank_E = _rank(logits_E, UNSET)
        equal_E = (rank_E == rank).to(tl.int32)
        in_time_E = tied + tl.cumsum(equal_E, 0) <= ties
        kept_E = (rank_E > rank) | ((rank_E == rank) & in_time_E)
        weight_E = tl.where(kept_E, _weight(row, logits_E), 0.0)
        reached_E = reached + tl.cumsum(weight_E.to(tl.float64), 0)
        found = _first_above(reached_E, weight_E, id_E, target)
        last = tl.maximum(last, tl.max(tl.where(weight_E > 0, id_E, -1), 0))
        reached = tl.max(reached_E, 0)
        tied += tl.sum(equal_E, 0)
        start += _GROUP
    return tl.where(found == _NOTHING, last, found)


@triton.jit
def _choose_spans(
    row, shortlist, peak_N, share_N, number_N, top_k, top_p, highest, spans, UNSET: tl.constexpr
):
    """Write the shortlist; returns its length, a rank not above the boundary, and the mass before top-k.

    What min-p leaves is short enough as it is.
    """
    vocabulary, min_p = row[1], row[4]
    lowest = _rank(tl.full([], -float("inf"), tl.float32), UNSET)
    eligible_N = (number_N < spans) & (_weight(row, peak_N) >= min_p)
    rank_N = tl.where(eligible_N, _rank(peak_N, UNSET), lowest)

    every = tl.full([], number_N.shape[0], tl.int64)
    by_count = (top_k > 0) & (top_k < vocabulary)
    by_guess = (top_p < 1) & (min_p == 0) & (by_count == 0)
    count = tl.where(by_count, top_k, tl.where(by_guess, _FIRST_GUESS, every))
    length, rank = _write_shortlist(shortlist, eligible_N, rank_N, number_N, count, lowest, highest)
    mass = tl.sum(share_N, 0)
    if min_p > 0:
        _counted, mass = _from_rank(row, shortlist, length, lowest, UNSET)
    elif by_guess:
        wanted = top_p.to(tl.float64) * mass
        _counted, listed = _from_rank(row, shortlist, length, rank, UNSET)
        while (listed < wanted) & (count < every):
            count *= 8
            length, rank = _write_shortlist(shortlist, eligible_N, rank_N, number_N, count, lowest, highest)
            _counted, listed = _from_rank(row, shortlist, length, rank, UNSET)
    return length, rank, mass


@triton.jit
def _draw_limited(
    row, shortlist, peak_N, share_N, number_N, top_k, top_p, u, spans, UNSET: tl.constexpr
):  # fmt: skip
    """An id among those that min-p, top-k and top-p leave, or -1 if none has a weight."""
    vocabulary, highest = row[1], _rank(row[2], UNSET)
    length, rank, mass = _choose_spans(
        row, shortlist, peak_N, share_N, number_N, top_k, top_p, highest, spans, UNSET
    )
    ties = tl.full([], _NOTHING, tl.int32)
    if (top_k > 0) & (top_k < vocabulary):
        rank, above, mass_above, equal = _boundary(row, shortlist, length, top_k, rank, highest, False, UNSET)
        ties = tl.minimum(top_k.to(tl.int32) - above, equal)
        mass = mass_above + ties * _weight_of_rank(row, rank, UNSET)
    if top_p < 1:
        wanted = top_p.to(tl.float64) * mass
        last_rank = rank
        rank, above, mass_above, equal = _boundary(row, shortlist, length, wanted, rank, highest, True, UNSET)
        each = _weight_of_rank(row, rank, UNSET)
        needed = tl.where(each > 0, tl.ceil((wanted - mass_above) / each), equal.to(tl.float64))
        needed = tl.minimum(tl.maximum(needed, 1.0), equal.to(tl.float64)).to(tl.int32)
        ties = tl.where(rank > last_rank, needed, tl.minimum(needed, ties))
        mass = mass_above + ties * each
    return _draw_listed(row, shortlist, length, rank, ties, u * mass, UNSET)


@triton.jit(do_not_specialize=["spans"])
def _draw(
    logits, peaks_RN, masses_RN, shortlists_RN,
    temperature_R, top_k_R, top_p_R, min_p_R, seed_R, choice_R, positions_R, drawn_R,
    vocabulary, spans,
    RANDOM: tl.constexpr, LIMITED: tl.constexpr, PURPOSE: tl.constexpr, UNSET: tl.constexpr,
    SPANS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row_logits = logits + index * vocabulary
    number_N = tl.arange(0, SPANS)
    peak_N = tl.load(peaks_RN + index * spans + number_N, mask=number_N < spans, other=-float("inf"))
    drawn = _most_likely(row_logits, vocabulary, peak_N, number_N, spans)
    if RANDOM:
        temperature = tl.load(temperature_R + index)
        if temperature > 0:
            top = tl.maximum(tl.max(peak_N, 0), _LOWEST)
            coldness = _coldness(temperature)
            mass_N = tl.load(masses_RN + index * spans + number_N, mask=number_N < spans, other=0.0)
            share_N = mass_N.to(tl.float64) * tl.exp((peak_N - top) * coldness).to(tl.float64)
            u = _uniform(
                tl.load(seed_R + index), tl.load(choice_R + index), tl.load(positions_R + index), PURPOSE
            )
            if LIMITED:
                top_k, top_p = tl.load(top_k_R + index), tl.load(top_p_R + index)
                min_p = tl.load(min_p_R + index)
                row = (row_logits, vocabulary, top, coldness, min_p)
                if (top_k > 0) | (top_p < 1) | (min_p > 0):
                    random = _draw_limited(
                        row, shortlists_RN + index * spans, peak_N, share_N, number_N, top_k, top_p, u,
                        spans, UNSET,
                    )  # fmt: skip
                else:
                    random = _draw_freely(row, share_N, number_N, u, spans)
            else:
                row = (row_logits, vocabulary, top, coldness, 0.0)
                random = _draw_freely(row, share_N, number_N, u, spans)
            drawn = tl.where(random < 0, drawn, random)
    tl.store(drawn_R + index, drawn.to(tl.int64))


@sample.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda logits_RV, batch, positions_R: logits_RV.dtype in _UNSET_BITS and len(logits_RV) > 0,
)
def _sample(logits_RV: Tensor, batch: SamplingBatch, positions_R: Tensor) -> Tensor:
    rows, vocabulary = logits_RV.shape
    spans = triton.cdiv(vocabulary, _SPAN.value)
    limited = batch.any_top_k or batch.any_top_p or batch.any_min_p
    device = logits_RV.device
    peaks_RN, masses_RN = torch.empty(2, rows, spans, dtype=torch.float32, device=device)
    shortlists_RN = torch.empty((rows, spans) if limited else 0, dtype=torch.int32, device=device)
    drawn_R = torch.empty(rows, dtype=torch.int64, device=device)
    _survey[triton.cdiv(spans, _GROUP.value), rows](
        logits_RV, batch.temperature_R, peaks_RN, masses_RN, vocabulary, spans,
        RANDOM=batch.any_random, num_warps=_WARPS,
    )  # fmt: skip
    _draw[(rows,)](
        logits_RV, peaks_RN, masses_RN, shortlists_RN,
        batch.temperature_R, batch.top_k_R, batch.top_p_R, batch.min_p_R, batch.seed_R, batch.choice_R,
        positions_R, drawn_R, vocabulary, spans,
        RANDOM=batch.any_random, LIMITED=limited, PURPOSE=TOKEN_DRAW, UNSET=_UNSET_BITS[logits_RV.dtype],
        SPANS=max(32, triton.next_power_of_2(spans)), num_warps=_WARPS,
    )  # fmt: skip
    return drawn_R
