"""Sampling: the next token of every row.

S of the R rows have a temperature, L of these top-k or top-p; W is V rounded up to whole spans.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.philox import exponential_, store_words, token_words
from atom_ops.tolerances import EXACT
from atom_ops.transfer import to_device

SAMPLE_TOKEN = 0
"""The `purpose` word of the Philox counter for sampling a token."""

_SPAN = 256
_CANDIDATES = 256
_LANES = 4  # tokens of one Philox call
_NOISE_SLICE = 1 << 20  # tokens of one chunk of noise
# The bits of floats in [0, 1] sort like the floats; the histograms take them as two 15-bit digits.
_BITS_OF_ONE = 0x3F800000
_DIGIT = 15
_DIGIT_MASK = (1 << _DIGIT) - 1
_FILTER_SLICE = 1 << 22  # weights of one pass: bounds the memory of the histograms' indices


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of R rows. Made by `from_host`, so that no step synchronises for them."""

    temperature_R: Tensor
    """float32; 0 is greedy."""
    top_k_R: Tensor
    """int64; 0 is off."""
    top_p_R: Tensor
    """float32; 1 is off."""
    min_p_R: Tensor
    """float32; 0 is off."""
    seed_R: Tensor
    """int64: the bits of the unsigned 64-bit seed."""
    sequence_R: Tensor
    """int64."""
    random_rows: Tensor | None
    """int64 [S]: the rows that are not greedy; None if all are."""
    filtered_rows: Tensor | None
    """int64 [L]: indices among the S rows of those with top-k or top-p; None if there are none."""
    any_random: bool
    """Whether S > 0; the flags below also refer to the S rows."""
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool

    @staticmethod
    def from_host(
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        seed: NDArray[np.uint64],
        sequence: NDArray[np.int64],
        device: torch.device,
    ) -> "SamplingBatch":
        """The parameters of a step's sampling rows, [R] each, copied to `device`.

        Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.
        """

        def tensor(column: NDArray[np.generic]) -> Tensor:
            return to_device(column, device)

        random = np.flatnonzero(temperature > 0)
        filtered = np.flatnonzero((top_k[random] > 0) | (top_p[random] < 1))
        return SamplingBatch(
            temperature_R=tensor(temperature),
            top_k_R=tensor(top_k),
            top_p_R=tensor(top_p),
            min_p_R=tensor(min_p),
            seed_R=tensor(seed.view(np.int64)),
            sequence_R=tensor(sequence),
            random_rows=None if len(random) == len(temperature) else tensor(random),
            filtered_rows=tensor(filtered) if len(filtered) else None,
            any_random=len(random) > 0,
            any_top_k=bool((top_k[random] > 0).any()),
            any_top_p=bool((top_p[random] < 1).any()),
            any_min_p=bool((min_p[random] > 0).any()),
        )

    def only(self, rows: Tensor) -> "SamplingBatch":
        """The same batch with the columns of these rows only; indices and flags stay as they are."""
        return replace(
            self,
            temperature_R=self.temperature_R[rows],
            top_k_R=self.top_k_R[rows],
            top_p_R=self.top_p_R[rows],
            min_p_R=self.min_p_R[rows],
            seed_R=self.seed_R[rows],
            sequence_R=self.sequence_R[rows],
        )


def _case(rows: int, vocabulary: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, SamplingBatch, Tensor]:
        logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)
        which = np.arange(rows)
        batch = SamplingBatch.from_host(
            temperature=np.where(which % 4, 0.9, 0.0).astype(np.float32),
            top_k=np.where(which % 3 == 1, 20, 0),
            top_p=np.where(which % 5 == 2, 0.8, 1.0).astype(np.float32),
            min_p=np.where(which % 7 == 3, 0.05, 0.0).astype(np.float32),
            seed=(which * 2**59).astype(np.uint64),
            sequence=which % 2,
            device=torch.device("cpu"),
        )
        return logits, batch, torch.randint(0, 5000, (rows,), generator=generator)

    return Case(f"{rows}x{vocabulary}", make)


@op([_case(1, 50), _case(40, 700), _case(9, 4133)], EXACT)
def sample(logits_RV: Tensor, batch: SamplingBatch, positions_R: Tensor) -> Tensor:
    """One token id for each row, int64 [R].

    `positions_R` (int64) are the sequence positions of the sampled tokens.

    Temperature 0 is the argmax, with ties to the smallest id. Other rows divide their logits by the
    temperature and filter tokens in this order:
      min-p   keeps tokens with at least min_p times the probability of the most likely one;
      top-k   keeps the k most likely tokens, ties by smallest id;
      top-p   keeps the shortest prefix of the most likely tokens with at least top_p of the
              remaining probability, and at least one token.
    The sampled id is the argmax of logit / temperature + Gumbel noise over the tokens that are
    kept, with ties to the smallest id. A token's noise is a function of the row's seed, sequence
    and position and of the token alone, so rounding changes a sample only where the two best
    tokens are within that rounding.

    This reference synchronises with the device for rows with top-k or top-p; no other provider
    does. A row with NaN logits, or with only minus infinity, gets some id of the vocabulary.
    """
    top_R, greedy_R = _top1(logits_RV)
    if not batch.any_random:
        return greedy_R
    rows = batch.random_rows
    if rows is None:
        return _sample_rows(logits_RV, top_R, batch, positions_R)
    logits_SV = logits_RV.index_select(0, rows)  # several times as fast as indexing
    sampled_S = _sample_rows(logits_SV, top_R[rows], batch.only(rows), positions_R[rows])
    return greedy_R.index_copy_(0, rows, sampled_S)


def _top1(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and the smallest id that has it.

    First the maximum of each span, because a maximum without an index takes a tenth of the time.
    """
    spans = logits_RV.unflatten(1, (-1, math.gcd(logits_RV.shape[1], _SPAN)))
    top_R, span_R = spans.amax(-1).max(-1)
    best = spans.gather(1, span_R[:, None, None].expand(-1, 1, spans.shape[2])).squeeze(1)
    return top_R, span_R * spans.shape[2] + best.max(-1).indices


def _sample_rows(logits_SV: Tensor, top_S: Tensor, batch: SamplingBatch, positions_S: Tensor) -> Tensor:
    """One id for each of the S rows; `batch` has the columns of these rows."""
    weights_SW = _weights(logits_SV, top_S, batch)
    rows = batch.filtered_rows
    if rows is None:
        sampled_S = _argmax_with_noise(weights_SW, batch, positions_S)
    elif len(rows) == len(positions_S):
        sampled_S = _sample_filtered(weights_SW, batch, positions_S)
    else:
        others = (
            torch.ones_like(positions_S, dtype=torch.bool).index_fill_(0, rows, False).nonzero().squeeze(1)
        )
        sampled_S = torch.empty_like(positions_S)
        sampled_S[others] = _argmax_with_noise(weights_SW[others], batch.only(others), positions_S[others])
        sampled_S[rows] = _sample_filtered(weights_SW[rows], batch.only(rows), positions_S[rows])
    # Only rows with NaN or without any finite logit are clamped.
    return sampled_S.clamp_(max=logits_SV.shape[1] - 1)


def _weights(logits_SV: Tensor, top_S: Tensor, batch: SamplingBatch) -> Tensor:
    """Probabilities relative to the most likely token, after min-p: float32 [S, W].

    Ids past the vocabulary have weight 0.
    """
    rows, vocabulary = logits_SV.shape
    width = -(-vocabulary // _SPAN) * _SPAN
    weights_SW = torch.empty(rows, width, dtype=torch.float32, device=logits_SV.device)
    # The maximum is subtracted before the division, which then cannot overflow.
    torch.sub(logits_SV, top_S.float()[:, None], out=weights_SW[:, :vocabulary])
    weights_SW[:, vocabulary:] = -torch.inf
    weights_SW.div_(batch.temperature_R[:, None]).exp_()
    if batch.any_min_p:
        weights_SW.masked_fill_(weights_SW < batch.min_p_R[:, None], 0)
    return weights_SW


def _argmax_with_noise(weights_RW: Tensor, batch: SamplingBatch, positions_R: Tensor) -> Tensor:
    """The id with the largest weight / exponential variate, which is the argmax with Gumbel noise.

    Some rows at a time, so that the random words stay in the cache.
    """
    rows, width = weights_RW.shape
    sampled_R = torch.empty_like(positions_R)
    size = max(1, _NOISE_SLICE // width)
    noise_RW = torch.empty_like(weights_RW[:size])
    for start in range(0, rows, size):
        chunk = slice(start, min(start + size, rows))
        scores = store_words(
            batch.seed_R[chunk],
            batch.sequence_R[chunk],
            positions_R[chunk],
            SAMPLE_TOKEN,
            noise_RW[: chunk.stop - start],
        )
        torch.div(weights_RW[chunk], exponential_(scores), out=scores)
        sampled_R[chunk] = _top1(scores)[1]
    return sampled_R


def _sample_filtered(weights_LW: Tensor, batch: SamplingBatch, positions_L: Tensor) -> Tensor:
    """One id among the tokens that top-k and top-p keep; `batch` is of the L rows."""
    top_k_L, top_p_L = batch.top_k_R, batch.top_p_R.double()
    sampled_L, complete_L = _sample_candidates(weights_LW, batch, positions_L)
    size = max(1, _FILTER_SLICE // weights_LW.shape[1])
    for rows in (~complete_L).nonzero().squeeze(1).split(size):
        chunk = weights_LW[rows]
        if batch.any_top_k:
            _keep_top_k(chunk, top_k_L[rows, None])
        if batch.any_top_p:
            _keep_top_p(chunk, top_p_L[rows, None])
        sampled_L[rows] = _argmax_with_noise(chunk, batch.only(rows), positions_L[rows])
    return sampled_L


def _sample_candidates(
    weights_LW: Tensor, batch: SamplingBatch, positions_L: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids sampled from the top 256 tokens, and whether these hold all tokens that the filters keep."""
    top_k_L, top_p_L = batch.top_k_R, batch.top_p_R.double()
    size = min(_CANDIDATES, weights_LW.shape[1])
    values, ids = weights_LW.topk(size, sorted=False)
    ids, by_id = ids.sort(-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    mass = values.cumsum(-1, dtype=torch.float64)

    last_L1 = torch.where(top_k_L > 0, top_k_L.clamp(max=size), size)[:, None] - 1
    left_L1 = mass.gather(1, last_L1)
    whole_L1 = weights_LW.sum(-1, keepdim=True).double()
    left_L1 = torch.where(top_k_L[:, None] > 0, left_L1, torch.maximum(whole_L1, left_L1))
    kept = torch.arange(size, device=ids.device) <= last_L1
    kept &= (mass - values < top_p_L[:, None] * left_L1) | (top_p_L[:, None] >= 1)
    kept[:, 0] = True

    # Other tokens may be as likely as the last candidate and have smaller ids.
    least_kept_L = values.gather(1, kept.sum(-1, keepdim=True) - 1).squeeze(1)
    least_L = values[:, -1]
    complete_L = (least_L == 0) | ((least_kept_L > least_L) & (top_k_L <= size))

    weights_by_id = torch.empty_like(values).scatter_(1, by_value, values * kept)
    words = token_words(batch.seed_R, batch.sequence_R, positions_L, ids // _LANES, SAMPLE_TOKEN)
    word = torch.stack(words, -1).gather(-1, (ids % _LANES)[..., None]).squeeze(-1)
    best = weights_by_id.div_(exponential_(word.float())).max(-1, keepdim=True).indices
    return ids.gather(1, best).squeeze(1), complete_L


def _keep_top_k(weights_LW: Tensor, top_k_L1: Tensor) -> None:
    """Zero all but the k most likely tokens, in place."""
    ones_LW = weights_LW.new_ones(()).expand_as(weights_LW)
    _keep_prefix(weights_LW, ones_LW, torch.where(top_k_L1 > 0, top_k_L1.double(), torch.inf))


def _keep_top_p(weights_LW: Tensor, top_p_L1: Tensor) -> None:
    """Zero all but the most likely tokens with top_p of the mass, in place."""
    mass_LW = weights_LW.double()
    wanted_L1 = top_p_L1 * mass_LW.sum(-1, keepdim=True)
    _keep_prefix(weights_LW, mass_LW, torch.where(top_p_L1 < 1, wanted_L1, torch.inf))


def _keep_prefix(weights_LW: Tensor, amount_LW: Tensor, wanted_L1: Tensor) -> None:
    """Zero all weights after the shortest prefix whose amounts sum up to `wanted_L1`, in place.

    The prefix is in the order of falling weight, then rising id, and has at least one token. Equal
    weights must have equal amounts. Two histograms of the weights' bits find its end, in a tenth of
    the time of a sort.
    """
    # Clamped, because the bits of NaN lie outside the histograms.
    key_LW = (_BITS_OF_ONE - weights_LW.view(torch.int32)).clamp_(0, _BITS_OF_ONE)
    high_LW = key_LW >> _DIGIT
    high_L1, before_L1 = _bucket(high_LW, amount_LW, wanted_L1, (_BITS_OF_ONE >> _DIGIT) + 1)
    wanted_L1 = wanted_L1 - before_L1
    inside_LW = amount_LW * (high_LW == high_L1)
    low_L1, before_L1 = _bucket(key_LW & _DIGIT_MASK, inside_LW, wanted_L1, 1 << _DIGIT)

    last_L1 = (high_L1 << _DIGIT | low_L1).to(torch.int32)
    equal_LW = key_LW == last_L1
    each_L1 = (amount_LW * equal_LW).amax(-1, keepdim=True)
    ties_L1 = ((wanted_L1 - before_L1) / each_L1).ceil_().clamp_(min=1)
    kept_LW = (key_LW < last_L1) | (equal_LW & (equal_LW.cumsum(-1, dtype=torch.int32) <= ties_L1))
    weights_LW.mul_(kept_LW)


def _bucket(digit_LW: Tensor, amount_LW: Tensor, wanted_L1: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """The digit at which amounts, summed by rising digit, reach `wanted_L1`, and the sum before it."""
    sums = torch.zeros(len(digit_LW), buckets, dtype=torch.float64, device=digit_LW.device)
    sums.scatter_add_(1, digit_LW.long(), amount_LW.double())
    reached = sums.cumsum(-1)
    found_L1 = torch.searchsorted(reached, wanted_L1).clamp_(max=buckets - 1)
    return found_L1, (reached - sums).gather(1, found_L1)
