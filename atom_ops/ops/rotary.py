"""Rotary position embedding."""

import torch
from torch import Tensor

from atom_ops.op import Case, op


def _case(heads: int, kv_heads: int, head_dim: int, rot_dim: int, interleaved: bool) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        q = torch.randn(11, heads, head_dim, generator=generator).to(dtype)
        k = torch.randn(11, kv_heads, head_dim, generator=generator).to(dtype)
        angles = torch.rand(40, rot_dim // 2, generator=generator) * 6.3
        positions = torch.randint(0, 40, (11,), generator=generator)
        return q, k, torch.cat((angles.cos(), angles.sin()), -1), positions, interleaved

    layout = "interleaved" if interleaved else "halves"
    return Case(f"{heads}/{kv_heads}x{head_dim}r{rot_dim}-{layout}", make)


@op([_case(9, 3, 64, 64, False), _case(4, 4, 32, 16, False), _case(4, 1, 32, 32, True)])
def rotary(
    q_THE: Tensor,
    k_TKE: Tensor,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Turn the first R of the E numbers of every query and key head by their position's angles.

    `cos_sin_PR` is float32: R/2 cosines, then R/2 sines, for each position. Pair i is the
    numbers (i, i + R/2), or (2i, 2i + 1) when `interleaved`. Computed in float32. The inputs
    need a contiguous last dimension only.
    """
    cos_T1r, sin_T1r = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
    return (
        _rotate(q_THE, cos_T1r, sin_T1r, interleaved),
        _rotate(k_TKE, cos_T1r, sin_T1r, interleaved),
    )


def _rotate(x_THE: Tensor, cos_T1r: Tensor, sin_T1r: Tensor, interleaved: bool) -> Tensor:
    half = cos_T1r.shape[-1]
    turned, rest = x_THE[..., : 2 * half], x_THE[..., 2 * half :]
    if interleaved:
        a, b = turned.unflatten(-1, (half, 2)).unbind(-1)
    else:
        a, b = turned[..., :half], turned[..., half:]
    pair = (a * cos_T1r - b * sin_T1r, b * cos_T1r + a * sin_T1r)
    both = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    both = both.to(x_THE.dtype)
    return torch.cat((both, rest), -1) if rest.shape[-1] else both
