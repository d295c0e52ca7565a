"""Triton kernels of `sample`: two launches, whatever the rows need, and no sort.

A row of V logits is cut into N spans of 128 ids.

  survey  one program for 16 spans of a row: each span's largest logit, and the sum of its weights
  draw    one program for a row: looks at the N maxima, then at the spans that matter

A weight is exp((logit - largest of the row) / temperature). The kept tokens are those above a
boundary logit and the first few, called ties, at it. The boundary is found by narrowing a range
of ranks; a rank is a float's bits as an integer that sorts like the float, less the low bits that
its dtype never sets. The boundary of top-k lies at or above the k-th largest of the spans' maxima,
so spans below that can be left out: the others are the shortlist. For top-p that k is a guess,
which is made larger until the shortlist has enough mass.
The split into programs depends on V alone: a row draws the same in any company.

In the kernels `row` is (pointer to its logits, vocabulary, largest logit, 1 / temperature, min_p),
`shortlist` is three pointers with room for N entries: span, mass above the boundary, ties there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling import TOKEN_DRAW, SamplingBatch, sample
from atom_ops.triton_impl import NEEDS, runs_on

_SPAN = tl.constexpr(128)
_SURVEYED = tl.constexpr(16)  # spans of a program
_GROUP = tl.constexpr(32)  # spans of the shortlist that are looked at together
_SURVEY_WARPS, _DRAW_WARPS = 4, 8
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
def _logit(rank, UNSET: tl.constexpr):
    key = rank << UNSET
    bits = tl.where(key < 0, (key | ((1 << UNSET) - 1)) ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _between(low, high):
    """The middle, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _weight(row, logit):
    weight = tl.exp((logit - row[2]) * row[3])
    return tl.where(weight < row[4], 0.0, weight)


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
    span_G = tl.program_id(0) * _SURVEYED + tl.arange(0, _SURVEYED)
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
def _entry_above(share_N, number_N, u):
    """Where the running sum of shares first exceeds u times the total; the sum before it, and the target."""
    reached_N = tl.cumsum(share_N, 0)
    target = u * tl.max(reached_N, 0)
    entry = tl.sum((reached_N <= target).to(tl.int32), 0)
    return entry, tl.max(tl.where(number_N < entry, reached_N, 0.0), 0), target


@triton.jit
def _draw_from_span(row, span, boundary, ties, before, target):
    """The first id of the span at which the running sum exceeds the target, or -1 if none has a weight."""
    logits, vocabulary = row[0], row[1]
    id_S = span * _SPAN + tl.arange(0, _SPAN)
    logits_S = _load_logits(logits, id_S, id_S < vocabulary)
    equal_S = logits_S == boundary
    kept_S = (logits_S > boundary) | (equal_S & (tl.cumsum(equal_S.to(tl.int32), 0) <= ties))
    weight_S = tl.where(kept_S, _weight(row, logits_S), 0.0)
    reached_S = before + tl.cumsum(weight_S.to(tl.float64), 0)
    found = tl.min(tl.where((reached_S > target) & (weight_S > 0), id_S, _NOTHING), 0)
    # The sums differ by roundings: stay where the span has an id with weight to give.
    last = tl.max(tl.where(weight_S > 0, id_S, -1), 0)
    return tl.where(found == _NOTHING, last, found)


@triton.jit
def _draw_freely(row, share_N, number_N, u, spans):
    """An id among all, or -1 if none has a weight."""
    span, before, target = _entry_above(share_N, number_N, u)
    return _draw_from_span(row, tl.minimum(span, spans - 1), -float("inf"), 0, before, target)


@triton.jit
def _write_shortlist(shortlist, peak_N, number_N, count, low, highest, UNSET: tl.constexpr):
    """List the spans whose maxima are the `count` largest, or equal to these, but none below `low`.

    Returns the length of the list and the rank from which on spans were taken.
    """
    high = highest + 1
    if count < tl.sum((peak_N >= _logit(low, UNSET)).to(tl.int32), 0):
        while low + 1 < high:
            middle = _between(low, high)
            enough = tl.sum((peak_N >= _logit(middle, UNSET)).to(tl.int32), 0) >= count
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    chosen_N = (peak_N >= _logit(low, UNSET)) & (peak_N > -float("inf"))
    place_N = tl.cumsum(chosen_N.to(tl.int32), 0) - 1
    tl.debug_barrier()  # a list before may still be read
    tl.store(shortlist[0] + place_N, number_N, mask=chosen_N)
    tl.debug_barrier()
    return tl.sum(chosen_N.to(tl.int32), 0), low


@triton.jit
def _load_listed(row, shortlist, start, length):
    """Logits of the next spans of the shortlist, [_GROUP, _SPAN]."""
    logits, vocabulary = row[0], row[1]
    entry_G = start + tl.arange(0, _GROUP)
    span_G = tl.load(shortlist[0] + entry_G, mask=entry_G < length, other=0)
    id_GS = span_G[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :]
    return _load_logits(logits, id_GS, (entry_G < length)[:, None] & (id_GS < vocabulary))


@triton.jit
def _split(row, shortlist, length, number_N, boundary):
    """Of each listed span, float64 [N]: the mass above the boundary, and how many tokens are at it."""
    start = tl.full([], 0, tl.int32)
    while start < length:  # interpreted, a range cannot end at a computed number
        logits_GS = _load_listed(row, shortlist, start, length)
        above_GS = tl.where(logits_GS > boundary, _weight(row, logits_GS), 0.0)
        entry_G = start + tl.arange(0, _GROUP)
        tl.store(shortlist[1] + entry_G, tl.sum(above_GS, 1), mask=entry_G < length)
        ties_G = tl.sum((logits_GS == boundary).to(tl.float32), 1)
        tl.store(shortlist[2] + entry_G, ties_G, mask=entry_G < length)
        start += _GROUP
    tl.debug_barrier()
    above_N = tl.load(shortlist[1] + number_N, mask=number_N < length, other=0.0)
    ties_N = tl.load(shortlist[2] + number_N, mask=number_N < length, other=0.0)
    tl.debug_barrier()
    return above_N.to(tl.float64), ties_N.to(tl.float64)


@triton.jit
def _amounts(row, shortlist, length, first, second, third, BY_MASS: tl.constexpr):
    """Count or mass of the listed tokens that reach each of three logits."""
    first_GS = tl.zeros((_GROUP, _SPAN), tl.float32)
    second_GS = tl.zeros((_GROUP, _SPAN), tl.float32)
    third_GS = tl.zeros((_GROUP, _SPAN), tl.float32)
    start = tl.full([], 0, tl.int32)
    while start < length:
        logits_GS = _load_listed(row, shortlist, start, length)
        amount_GS = _weight(row, logits_GS) if BY_MASS else tl.full((_GROUP, _SPAN), 1.0, tl.float32)
        first_GS += tl.where(logits_GS >= first, amount_GS, 0.0)
        second_GS += tl.where(logits_GS >= second, amount_GS, 0.0)
        third_GS += tl.where(logits_GS >= third, amount_GS, 0.0)
        start += _GROUP
    return _total(first_GS), _total(second_GS), _total(third_GS)


@triton.jit
def _total(amount_GS):
    return tl.sum(tl.sum(amount_GS, 1).to(tl.float64), 0)


@triton.jit
def _boundary(row, shortlist, length, wanted, low, highest, BY_MASS: tl.constexpr, UNSET: tl.constexpr):
    """The largest rank from which on tokens, or their mass, add up to `wanted`, if from `low` on they do.

    Also what is above that rank.
    """
    high = highest + 1
    above = tl.full([], 0.0, tl.float64)
    while low + 1 < high:
        second = _between(low, high)
        first, third = _between(low, second), _between(second, high)
        amount_1, amount_2, amount_3 = _amounts(
            row, shortlist, length, _logit(first, UNSET), _logit(second, UNSET), _logit(third, UNSET), BY_MASS
        )
        reach_1, reach_2, reach_3 = amount_1 >= wanted, amount_2 >= wanted, amount_3 >= wanted
        above = tl.where(reach_3, above, tl.where(reach_2, amount_3, tl.where(reach_1, amount_2, amount_1)))
        high = tl.where(reach_3, high, tl.where(reach_2, third, tl.where(reach_1, second, first)))
        low = tl.where(reach_3, third, tl.where(reach_2, second, tl.where(reach_1, first, low)))
    return low, above


@triton.jit
def _least_rank(row, top_p, mass, tokens, UNSET: tl.constexpr):
    """A rank that the boundary of top-p cannot lie below.

    Tokens lighter than (1 - p) * mass / tokens have less than (1 - p) * mass together.
    """
    weight = (1.0 - top_p.to(tl.float64)) * mass / tokens
    logit = row[2] + (tl.log(weight.to(tl.float32)) - 0.01) / row[3]
    return _rank(tl.maximum(logit, -float("inf")), UNSET)


@triton.jit
def _choose_spans(row, shortlist, peak_N, number_N, mass, top_k, top_p, highest, UNSET: tl.constexpr):
    """Write the shortlist; returns its length and a rank not above the boundary."""
    vocabulary, min_p = row[1], row[4]
    lowest = _rank(tl.full([], -float("inf"), tl.float32), UNSET)
    count = tl.full([], _NOTHING, tl.int64)
    wanted = tl.full([], 0.0, tl.float64)
    if (top_k > 0) & (top_k < vocabulary):
        count = top_k
    elif (top_p < 1) & (min_p == 0):  # what min-p leaves is short enough as it is
        count = tl.full([], _FIRST_GUESS, tl.int64)
        wanted = top_p.to(tl.float64) * mass
        lowest = _least_rank(row, top_p, mass, vocabulary, UNSET)
    length, rank = _write_shortlist(shortlist, peak_N, number_N, count, lowest, highest, UNSET)
    listed = wanted
    if wanted > 0:
        listed = _mass_from(row, shortlist, length, number_N, rank, UNSET)
    while (listed < wanted) & (rank > lowest):
        count *= 8
        length, rank = _write_shortlist(shortlist, peak_N, number_N, count, lowest, highest, UNSET)
        listed = _mass_from(row, shortlist, length, number_N, rank, UNSET)
    return length, rank


@triton.jit
def _mass_from(row, shortlist, length, number_N, rank, UNSET: tl.constexpr):
    boundary = _logit(rank, UNSET)
    above_N, ties_N = _split(row, shortlist, length, number_N, boundary)
    return tl.sum(above_N, 0) + tl.sum(ties_N, 0) * _weight(row, boundary)


@triton.jit
def _draw_limited(row, shortlist, peak_N, share_N, number_N, top_k, top_p, u, UNSET: tl.constexpr):
    """An id among those that min-p, top-k and top-p leave, or -1 if none has a weight."""
    vocabulary, min_p = row[1], row[4]
    by_count = (top_k > 0) & (top_k < vocabulary)
    highest = _rank(row[2], UNSET)
    peak_N = tl.where(_weight(row, peak_N) >= min_p, peak_N, -float("inf"))
    mass = tl.sum(share_N, 0)
    length, rank = _choose_spans(row, shortlist, peak_N, number_N, mass, top_k, top_p, highest, UNSET)
    ties = tl.full([], _NOTHING, tl.int32).to(tl.float64)
    if by_count:
        rank, above = _boundary(row, shortlist, length, top_k, rank, highest, False, UNSET)
        ties = top_k - above
    boundary = _logit(rank, UNSET)
    above_N, ties_N = _split(row, shortlist, length, number_N, boundary)
    if by_count | (min_p > 0):
        mass = tl.sum(above_N, 0) + tl.minimum(ties, tl.sum(ties_N, 0)) * _weight(row, boundary)
    if top_p < 1:
        wanted, last_rank = top_p.to(tl.float64) * mass, rank
        least = _least_rank(row, top_p, mass, tl.where(by_count, top_k, vocabulary), UNSET)
        rank, above = _boundary(row, shortlist, length, wanted, tl.maximum(rank, least), highest, True, UNSET)
        boundary = _logit(rank, UNSET)
        each = _weight(row, boundary).to(tl.float64)
        needed = tl.where(each > 0, tl.maximum(tl.ceil((wanted - above) / each), 1.0), ties)
        ties = tl.where(rank > last_rank, needed, tl.minimum(needed, ties))
        above_N, ties_N = _split(row, shortlist, length, number_N, boundary)

    kept_N = tl.maximum(tl.minimum(ties - (tl.cumsum(ties_N, 0) - ties_N), ties_N), 0.0)
    entry, before, target = _entry_above(above_N + kept_N * _weight(row, boundary), number_N, u)
    entry = tl.minimum(entry, length - 1)
    span = tl.load(shortlist[0] + entry, mask=entry >= 0, other=0)
    kept = tl.sum(tl.where(number_N == entry, kept_N, 0.0), 0)
    return _draw_from_span(row, span, boundary, kept, before, target)


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
                    place = index * spans
                    shortlist = (shortlists_RN + place, masses_RN + place, peaks_RN + place)
                    random = _draw_limited(row, shortlist, peak_N, share_N, number_N, top_k, top_p, u, UNSET)
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
    _survey[triton.cdiv(spans, _SURVEYED.value), rows](
        logits_RV, batch.temperature_R, peaks_RN, masses_RN, vocabulary, spans,
        RANDOM=batch.any_random, num_warps=_SURVEY_WARPS,
    )  # fmt: skip
    _draw[(rows,)](
        logits_RV, peaks_RN, masses_RN, shortlists_RN,
        batch.temperature_R, batch.top_k_R, batch.top_p_R, batch.min_p_R, batch.seed_R, batch.choice_R,
        positions_R, drawn_R, vocabulary, spans,
        RANDOM=batch.any_random, LIMITED=limited, PURPOSE=TOKEN_DRAW, UNSET=_UNSET_BITS[logits_RV.dtype],
        SPANS=max(32, triton.next_power_of_2(spans)), num_warps=_DRAW_WARPS,
    )  # fmt: skip
    return drawn_R
