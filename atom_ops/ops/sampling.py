"""Drawing the next token of every row.

S rows with a temperature, L rows limited by top-k or top-p, B candidates of a limited row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.philox import uniform
from atom_ops.tolerances import EXACT

TOKEN_DRAW = 0
"""The purpose, in the random counter, of the draw that picks a token."""

_SPAN = 256
# Most limited rows are settled by few candidates; a sort of the whole vocabulary comes last.
_CANDIDATES = (256, 4096)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How R rows draw. Made by `from_host`, so that the device is never asked who needs what."""

    random_rows: Tensor | None
    """int64 [S]: the rows that are not greedy; None when that is all."""
    temperature_S: Tensor
    """float32."""
    min_p_S: Tensor | None
    """float32; None when none has one."""
    seed_S: Tensor
    """int64: the bits of the unsigned 64-bit seed."""
    choice_S: Tensor
    """int64."""
    limited_rows: Tensor | None
    """int64 [L]: which of the S have a top-k or a top-p; None when none has."""
    top_k_L: Tensor
    """int64; 0 is off."""
    top_p_L: Tensor
    """float64."""
    largest_top_k: int

    @staticmethod
    def from_host(
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        seed: NDArray[np.uint64],
        choice: NDArray[np.int64],
        device: torch.device,
    ) -> "SamplingBatch":
        """Columns of the rows that draw in one step, [R] each, copied to `device`.

        A temperature of 0 is greedy, a `top_k` of 0, a `top_p` of 1 and a `min_p` of 0 are off.
        """

        def tensor(column: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(column).to(device)

        random = np.flatnonzero(temperature > 0)
        limited = np.flatnonzero((top_k[random] > 0) | (top_p[random] < 1))
        min_p = min_p[random]
        return SamplingBatch(
            random_rows=None if len(random) == len(temperature) else tensor(random),
            temperature_S=tensor(temperature[random]),
            min_p_S=tensor(min_p) if min_p.any() else None,
            seed_S=tensor(seed[random].view(np.int64)),
            choice_S=tensor(choice[random]),
            limited_rows=tensor(limited) if len(limited) else None,
            top_k_L=tensor(top_k[random][limited]),
            top_p_L=tensor(top_p[random][limited].astype(np.float64)),
            largest_top_k=int(top_k[random].max(initial=0)),
        )


def _case(rows: int, vocabulary: int) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, SamplingBatch, Tensor]:
        logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)
        which = np.arange(rows)
        batch = SamplingBatch.from_host(
            temperature=np.where(which % 4, 0.9, 0.0).astype(np.float32),
            top_k=np.where(which % 3 == 1, 20, 0),
            top_p=np.where(which % 5 == 2, 0.8, 1.0).astype(np.float32),
            min_p=np.where(which % 7 == 3, 0.05, 0.0).astype(np.float32),
            seed=(which * 2**59).astype(np.uint64),
            choice=which % 2,
            device=torch.device("cpu"),
        )
        return logits, batch, torch.randint(0, 5000, (rows,), generator=generator)

    return Case(f"{rows}x{vocabulary}", make)


@op([_case(1, 50), _case(40, 700)], EXACT)
def sample(logits_RV: Tensor, batch: SamplingBatch, positions_R: Tensor) -> Tensor:
    """One token id for each row, int64 [R].

    `positions_R` (int64) is the index that the drawn token will have in its sequence.

    A greedy row takes the most likely token, the smallest id among equals. Any other row divides
    its logits by its temperature and drops tokens in this order:
      min-p   those less likely than min_p times the most likely one;
      top-k   all but the k most likely, smaller ids first among equals;
      top-p   all but the shortest run of most likely tokens that has at least top_p of the
              probability that is left, and at least one token.
    Then it takes the first id, in id order, whose cumulative probability exceeds u times the
    probability left; u is `philox.uniform` of the row's seed, choice and position.

    Rows limited by top-k or top-p wait for the device; other rows do not. A row with NaN among
    its logits draws some id of the vocabulary.
    """
    # max and argmax agree, but argmax is four times as slow on bfloat16.
    top_R, greedy_R = logits_RV.max(-1)
    if not len(batch.temperature_S):
        return greedy_R
    rows = batch.random_rows
    if rows is None:
        return _draw(logits_RV, top_R, batch, positions_R)
    drawn_S = _draw(logits_RV[rows], top_R[rows], batch, positions_R[rows])
    return greedy_R.index_copy_(0, rows, drawn_S)


def _draw(logits_SV: Tensor, top_S: Tensor, batch: SamplingBatch, positions_S: Tensor) -> Tensor:
    u_S = uniform(batch.seed_S, batch.choice_S, positions_S, TOKEN_DRAW)
    weights_SW = _weights(logits_SV, top_S, batch)
    rows, vocabulary = batch.limited_rows, logits_SV.shape[1]
    if rows is None:
        return _draw_free(weights_SW, u_S, vocabulary)
    drawn_L = _draw_limited(weights_SW[rows, :vocabulary], u_S[rows], batch)
    if len(rows) == len(u_S):
        return drawn_L
    return _draw_free(weights_SW, u_S, vocabulary).index_copy_(0, rows, drawn_L)


def _weights(logits_SV: Tensor, top_S: Tensor, batch: SamplingBatch) -> Tensor:
    """Probabilities relative to the most likely token, after min-p: float32 [S, W].

    W is V rounded up to whole spans; the tokens that do not exist have weight 0.
    """
    rows, vocabulary = logits_SV.shape
    width = -(-vocabulary // _SPAN) * _SPAN
    weights_SW = torch.empty(rows, width, dtype=torch.float32, device=logits_SV.device)
    weights_SW[:, :vocabulary] = logits_SV
    weights_SW[:, vocabulary:] = -torch.inf
    # The largest is taken off before the division, which then cannot overflow.
    weights_SW.sub_(top_S[:, None]).div_(batch.temperature_S[:, None]).exp_()
    if batch.min_p_S is not None:
        weights_SW.masked_fill_(weights_SW < batch.min_p_S[:, None], 0)
    return weights_SW


def _draw_free(weights_SW: Tensor, u_S: Tensor, vocabulary: int) -> Tensor:
    """The first id whose cumulative weight exceeds u times the total.

    First the span of ids that holds it, then the id in that span: a running sum over every id
    would be many times slower than the sums of spans.
    """
    spans = weights_SW.unflatten(1, (-1, _SPAN))
    mass = spans.sum(-1).double()
    reached = mass.cumsum(-1)
    target = (u_S * reached[:, -1])[:, None]
    span = _first_above(reached, target)
    inside = spans.gather(1, span[:, :, None].expand(-1, -1, _SPAN)).squeeze(1).double().cumsum(-1)
    rest = target - (reached - mass).gather(1, span)
    # The sums differ by roundings: stay where the span has an id with weight to give.
    highest = torch.nextafter(inside[:, -1:], torch.zeros_like(rest))
    rest = torch.minimum(rest.clamp_(min=0), highest)
    # Without NaN in the logits nothing is clamped here.
    return (span * _SPAN + _first_above(inside, rest)).squeeze(1).clamp_(max=vocabulary - 1)


def _draw_limited(weights_LV: Tensor, u_L: Tensor, batch: SamplingBatch) -> Tensor:
    """Like `_draw_free` among the tokens that top-k and top-p leave.

    Takes as few candidates as will do, row by row.
    """
    vocabulary = weights_LV.shape[1]
    top_k_L = batch.top_k_L.clamp(max=vocabulary)
    drawn_L = torch.empty_like(top_k_L)
    open_rows = torch.arange(len(drawn_L), device=drawn_L.device)
    for size in (*_CANDIDATES, vocabulary):
        if size < min(batch.largest_top_k, vocabulary):
            continue
        ids, settled = _draw_among(
            weights_LV[open_rows],
            u_L[open_rows],
            top_k_L[open_rows],
            batch.top_p_L[open_rows],
            min(size, vocabulary),
        )
        drawn_L[open_rows] = ids
        open_rows = open_rows[~settled]
        if not len(open_rows):
            break
    return drawn_L


def _draw_among(
    weights_LV: Tensor, u_L: Tensor, top_k_L: Tensor, top_p_L: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Drawn ids, and whether the `size` most likely tokens were enough to be sure of them."""
    values, ids = weights_LV.topk(size, sorted=False)
    ids, by_id = ids.sort(-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    mass = values.cumsum(-1, dtype=torch.float64)

    unlimited = top_k_L == 0
    last = torch.where(unlimited, size, top_k_L) - 1
    whole = mass[:, -1] if size == weights_LV.shape[1] else weights_LV.sum(-1).double()
    total = torch.where(unlimited, whole, mass.gather(1, last[:, None]).squeeze(1))
    kept = torch.arange(size, device=ids.device) <= last[:, None]
    kept &= mass - values < (top_p_L * total)[:, None]
    kept[:, 0] = True

    # Outside the candidates there may be tokens as likely as the last of them, with smaller ids.
    least_kept = values.gather(1, kept.sum(-1, keepdim=True) - 1).squeeze(1)
    least = values[:, -1]
    settled = (least_kept > least) | (least == 0)
    if size == weights_LV.shape[1]:
        settled = torch.ones_like(settled)

    kept_by_id = torch.empty_like(values).scatter_(1, by_value, values * kept)
    reached = kept_by_id.cumsum(-1, dtype=torch.float64)
    return ids.gather(1, _first_above(reached, u_L[:, None] * reached[:, -1:])).squeeze(1), settled


def _first_above(reached: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry of each row that is greater than the row's target, [rows, 1]."""
    found = torch.searchsorted(reached, target, right=True)
    return found.clamp_(max=reached.shape[1] - 1)
