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
from atom_ops.ops.sampling.philox import exponential_, store_words, token_words
from atom_ops.tolerances import EXACT
from atom_ops.transfer import to_device

SAMPLE_TOKEN = 0
"""The `purpose` word of the Philox counter for sampling a token."""

_SPAN = 256
_TOP1_SPAN = 512
_CANDIDATES = 256
_LANES = 4  # tokens of one Philox call
_NOISE_SLICE = 1 << 20  # tokens of one chunk of noise
# The best token has weight 1 and a variate below 17, other variates are at least 2**-33: a token with
# less weight than this is never sampled.
_NEGLIGIBLE = 2.0**-38
_FILTER_SLICE = 1 << 20  # weights of one pass: bounds the memory of their masks


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

    def repeated(self, times: int) -> "SamplingBatch":
        """The batch of `times` rows for each row, one after another; does not wait for the device."""

        def of_each(indices: Tensor | None) -> Tensor | None:
            if indices is None:
                return None
            return (indices[:, None] * times + torch.arange(times, device=indices.device)).flatten()

        return replace(
            self,
            temperature_R=self.temperature_R.repeat_interleave(times),
            top_k_R=self.top_k_R.repeat_interleave(times),
            top_p_R=self.top_p_R.repeat_interleave(times),
            min_p_R=self.min_p_R.repeat_interleave(times),
            seed_R=self.seed_R.repeat_interleave(times),
            sequence_R=self.sequence_R.repeat_interleave(times),
            random_rows=of_each(self.random_rows),
            filtered_rows=of_each(self.filtered_rows),
        )

    def select(self, rows: Tensor) -> "SamplingBatch":
        """The batch of these rows (int64) alone. Waits for the device."""
        chosen = self.only(rows)
        return SamplingBatch.from_host(
            temperature=chosen.temperature_R.numpy(force=True),
            top_k=chosen.top_k_R.numpy(force=True),
            top_p=chosen.top_p_R.numpy(force=True),
            min_p=chosen.min_p_R.numpy(force=True),
            seed=chosen.seed_R.numpy(force=True).view(np.uint64),
            sequence=chosen.sequence_R.numpy(force=True),
            device=rows.device,
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
    top_R, greedy_R = top1(logits_RV)
    if not batch.any_random:
        return greedy_R
    rows = batch.random_rows
    if rows is None:
        return _sample_rows(logits_RV, top_R, batch, positions_R)
    logits_SV = logits_RV.index_select(0, rows)  # several times as fast as indexing
    sampled_S = _sample_rows(logits_SV, top_R[rows], batch.only(rows), positions_R[rows])
    return greedy_R.index_copy_(0, rows, sampled_S)


def top1(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and the smallest id that has it.

    First the maximum of each span, because a maximum without an index takes a tenth of the time.
    """
    spans = logits_RV.unflatten(1, (-1, math.gcd(logits_RV.shape[1], _TOP1_SPAN)))
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
            weights_RW[chunk] > _NEGLIGIBLE,
            noise_RW[: chunk.stop - start],
        )
        torch.div(weights_RW[chunk], exponential_(scores), out=scores)
        sampled_R[chunk] = top1(scores)[1]
    return sampled_R


def _sample_filtered(weights_LW: Tensor, batch: SamplingBatch, positions_L: Tensor) -> Tensor:
    """One id among the tokens that top-k and top-p keep; `batch` is of the L rows."""
    sampled_L, complete_L = _sample_candidates(weights_LW, batch, positions_L)
    rest = (~complete_L).nonzero().squeeze(1)
    for rows in rest.split(max(1, _FILTER_SLICE // weights_LW.shape[1])):
        chunk = weights_LW[rows]
        part = batch.only(rows)
        if batch.any_top_k:
            _keep_top_k(chunk, part.top_k_R[:, None])
        sampled_L[rows] = _sample_top_p(chunk, part, positions_L[rows])
    return sampled_L


def _sample_top_p(weights_LW: Tensor, batch: SamplingBatch, positions_L: Tensor) -> Tensor:
    """One id among the tokens that top-p keeps; changes the weights.

    The best token of all is the answer if top-p keeps it. Otherwise top-p keeps none of the less
    likely tokens either: the row is sampled again without them, 1 - log(top_p) times on average.
    """
    ids = torch.arange(weights_LW.shape[1], device=weights_LW.device)
    wanted_L = batch.top_p_R.double() * weights_LW.sum(-1, dtype=torch.float64)
    wanted_L.masked_fill_(batch.top_p_R >= 1, torch.inf)
    sampled_L = _argmax_with_noise(weights_LW, batch, positions_L)
    rows = torch.arange(len(sampled_L), device=ids.device)
    while True:
        sampled_L1 = sampled_L[rows, None]
        least_L1 = weights_LW.gather(1, sampled_L1)
        # The tokens before the sampled one, by falling weight, then rising id.
        before_LW = (weights_LW > least_L1) | ((weights_LW == least_L1) & (ids < sampled_L1))
        weights_LW *= before_LW
        mass_L = weights_LW.sum(-1, dtype=torch.float64)
        # The most likely token is always kept; rows with NaN end here too.
        again = ((mass_L >= wanted_L[rows]) & (mass_L > 0)).nonzero().squeeze(1)
        if not len(again):
            return sampled_L
        weights_LW, rows = weights_LW[again], rows[again]
        sampled_L[rows] = _argmax_with_noise(weights_LW, batch.only(rows), positions_L[rows])


def _sample_candidates(
    weights_LW: Tensor, batch: SamplingBatch, positions_L: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids sampled from the top 256 tokens, and whether these hold all tokens that the filters keep."""
    top_k_L = batch.top_k_R
    top_p_L = batch.top_p_R.double()
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
    """Zero all but the k most likely tokens, in place; ties are kept by smallest id."""
    vocabulary = weights_LW.shape[1]
    for weights_W, top_k in zip(weights_LW, top_k_L1.flatten().tolist(), strict=True):
        if 0 < top_k < vocabulary:
            least = weights_W.kthvalue(vocabulary - top_k + 1).values
            above_W = weights_W > least
            equal_W = weights_W == least
            equal_W &= equal_W.cumsum(-1) <= top_k - above_W.sum()
            weights_W *= above_W | equal_W
