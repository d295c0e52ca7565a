"""Log probabilities of given tokens, and the most likely ones in their places.

N tokens, W columns: the token itself and the most likely.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import DEFAULT

_SLICE = 1 << 20  # logits looked at together: their sorting keys should fit a cache
_WORD = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Column 0 is the token itself; the most likely follow, the most likely first."""

    ids_NW: Tensor
    """int64."""
    values_NW: Tensor
    """float32: natural logarithms."""
    ranks_N: Tensor
    """int64: how many ids are more likely than the token, plus 1."""

    @staticmethod
    def joined(parts: Sequence["TokenLogprobs"]) -> "TokenLogprobs":
        """One after another; all as wide as the first."""
        if len(parts) == 1:
            return parts[0]
        return TokenLogprobs(
            torch.cat([part.ids_NW for part in parts]),
            torch.cat([part.values_NW for part in parts]),
            torch.cat([part.ranks_N for part in parts]),
        )


def _case(tokens: int, vocabulary: int, top: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
        logits = (torch.randn(tokens, vocabulary, generator=generator) * 4).to(dtype)
        return logits, torch.randint(0, vocabulary, (tokens,), generator=generator), top

    return Case(f"{tokens}x{vocabulary}-top{top}", make)


@op([_case(1, 50, 0), _case(9, 700, 20), _case(2, 3, 5)], DEFAULT)
def token_logprobs(logits_NV: Tensor, ids_N: Tensor, top: int) -> TokenLogprobs:
    """Log softmax, in float32, at `ids_N` (int64) and at the `top` most likely ids of each row.

    Among equal logits the smaller id comes first, as in a greedy draw. W is 1 + top, or 1 + V where
    the vocabulary is smaller. NaN among a row's logits makes its values NaN; the ids stay ids of
    the vocabulary.
    """
    size = max(1, _SLICE // logits_NV.shape[1])
    top = min(top, logits_NV.shape[1])
    slices = zip(logits_NV.split(size), ids_N.split(size), strict=True)
    return TokenLogprobs.joined([_of_slice(logits, ids, top) for logits, ids in slices])


def _of_slice(logits_NV: Tensor, ids_N: Tensor, top: int) -> TokenLogprobs:
    logits_NV = logits_NV.float()
    ids_NW = ids_N[:, None]
    logits_N1 = logits_NV.gather(1, ids_NW)
    ranks_N = (logits_NV > logits_N1).sum(-1) + 1
    if top:
        ids_NW = torch.cat((ids_NW, _top_ids(logits_NV, top)), dim=1)
    # Not logsumexp: on a GPU that cuts a row into parts that depend on the number of rows.
    values_NW = logits_NV.log_softmax(-1).gather(1, ids_NW)
    return TokenLogprobs(ids_NW, values_NW, ranks_N)


def _top_ids(logits_NV: Tensor, top: int) -> Tensor:
    """Ids by falling logit, then rising id, [N, top].

    torch.topk leaves the order of equals open, so it is given keys that are never equal: the bits
    of the logit, made to sort as integers, above those of the id counted from the other end.
    """
    bits_NV = (logits_NV + 0.0).view(torch.int32)  # minus zero becomes zero
    bits_NV ^= (bits_NV >> 31).bitwise_and_(_MAGNITUDE)
    back_V = torch.arange(_WORD, _WORD - logits_NV.shape[1], -1, device=logits_NV.device)
    keys_NV = bits_NV.long().bitwise_left_shift_(32).bitwise_or_(back_V)
    return _WORD - (keys_NV.topk(top).values & _WORD)
