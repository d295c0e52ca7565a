"""Log probabilities of given tokens and of the top-k tokens at their positions.

N tokens; W columns: the token itself, then the top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import DEFAULT

_SLICE = 1 << 20  # logits of one pass: their sort keys should fit a cache
_WORD = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Column 0 is the token itself; the top-k follow, most likely first."""

    ids_NW: Tensor
    """int64."""
    values_NW: Tensor
    """float32: natural logarithms."""
    ranks_N: Tensor
    """int64: rank of the token, from 1: 1 + the number of ids that are more likely."""

    @staticmethod
    def joined(parts: Sequence["TokenLogprobs"]) -> "TokenLogprobs":
        """The concatenation; all must be as wide as the first."""
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
    """Log softmax in float32 at `ids_N` (int64) and at the top `top` ids of each row.

    Equal logits are ordered by id, as in greedy sampling. W is 1 + min(top, V). For a row with NaN
    the values are NaN and the ids are valid.
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
    # Not logsumexp: on a GPU its reduction order depends on the number of rows.
    values_NW = logits_NV.log_softmax(-1).gather(1, ids_NW)
    return TokenLogprobs(ids_NW, values_NW, ranks_N)


def _top_ids(logits_NV: Tensor, top: int) -> Tensor:
    """Top-k ids, ordered by falling logit, then rising id, [N, top].

    torch.topk does not define the order of equal values, so it gets unique keys: the logit's bits
    as a sortable integer, then the id counted from the end.
    """
    bits_NV = (logits_NV + 0.0).view(torch.int32)  # minus zero becomes zero
    bits_NV ^= (bits_NV >> 31).bitwise_and_(_MAGNITUDE)
    back_V = torch.arange(_WORD, _WORD - logits_NV.shape[1], -1, device=logits_NV.device)
    keys_NV = bits_NV.long().bitwise_left_shift_(32).bitwise_or_(back_V)
    return _WORD - (keys_NV.topk(top).values & _WORD)
