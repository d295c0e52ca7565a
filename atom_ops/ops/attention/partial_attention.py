"""Attention from partial results: ranks that split the cached tokens each attend to their own.

    rank    has every head's attention to its tokens     out [T, H, C], log-sum-exp [T, H]
    packed  for each rank its heads, one message         [R, T, H / R, C + L]
    merged  on each rank its own heads                   [T, H / R, C]

L: columns of the packed dtype that hold a float32, the log-sum-exp.
"""

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import REDUCTION


def pack_partials(out_THC: Tensor, lse_TH: Tensor, ranks: int) -> Tensor:
    """Results for each rank, [R, T, H / R, C + L]: rank r gets the r-th part of the heads. C is even."""
    lse_THL = lse_TH[..., None].view(out_THC.dtype)
    return torch.cat([x.unflatten(1, (ranks, -1)).movedim(1, 0) for x in (out_THC, lse_THL)], -1)


def unpack_partials(packed_RTHX: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the ranks' results [R, T, H, C] and their log-sum-exp [R, T, H], float32."""
    columns = torch.float32.itemsize // packed_RTHX.dtype.itemsize
    out_RTHC, lse_RTHL = packed_RTHX.split([packed_RTHX.shape[-1] - columns, columns], -1)
    return out_RTHC, lse_RTHL.view(torch.float32).squeeze(-1)


def _case(ranks: int, tokens: int, heads: int, width: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        out = torch.randn(ranks, tokens, heads, width, generator=generator).to(dtype)
        lse = 4 * torch.randn(ranks, tokens, heads, generator=generator)
        sees_none = torch.rand(ranks, tokens, heads, generator=generator) < 0.3
        sees_none[:, 0] = True
        lse[sees_none] = -torch.inf
        out[sees_none] = 0
        packed = [pack_partials(*each, 1) for each in zip(out, lse, strict=True)]
        return unpack_partials(torch.cat(packed))

    return Case(f"{ranks}x{tokens}x{heads}x{width}", make)


@op([_case(2, 1, 16, 512), _case(8, 5, 16, 512), _case(3, 30, 5, 40)], REDUCTION)
def merge_partials(out_RTHC: Tensor, lse_RTH: Tensor) -> Tensor:
    """Attention to the tokens of all ranks, [T, H, C], from each rank's results for the same heads.

    Exact up to rounding: softmax over all tokens. 0 where no rank has a token that the query sees.
    Only the last dimension of `out_RTHC` must be contiguous.
    """
    # Finite, because inf - inf would be NaN.
    top_TH = lse_RTH.amax(0).clamp(min=torch.finfo(torch.float32).min)
    weight_RTH = torch.exp(lse_RTH - top_TH)
    total_TH = weight_RTH.sum(0)
    sum_THC = (out_RTHC * weight_RTH[..., None]).sum(0)
    return (sum_THC / total_TH.where(total_TH > 0, 1)[..., None]).to(out_RTHC.dtype)
