"""Rotary position embedding."""

import torch
from torch import Tensor

from atom_ops.op import Case, op


def _case(heads: int, kv_heads: int, head_dim: int, rot_dim: int, interleaved: bool) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
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
    cos_T1r, sin_T1r = cos_sin_PR.index_select(0, positions_T).unsqueeze(1).chunk(2, dim=-1)
    join = _alternate if interleaved else _append
    cos_T1R, sin_T1R = join(cos_T1r, cos_T1r), join(-sin_T1r, sin_T1r)
    return _turn(q_THE, cos_T1R, sin_T1R, interleaved), _turn(k_TKE, cos_T1R, sin_T1R, interleaved)


def _append(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), -1)


def _alternate(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2)


def _turn(x_THE: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool) -> Tensor:
    """x cos + x' sin, where x' has the two numbers of each pair exchanged."""
    rot_dim = cos_T1R.shape[-1]
    turned, rest = x_THE[..., :rot_dim], x_THE[..., rot_dim:]
    if interleaved:
        exchanged = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        exchanged = turned.roll(rot_dim // 2, -1)
    both = (turned * cos_T1R).addcmul_(exchanged, sin_T1R).to(x_THE.dtype)
    return torch.cat((both, rest), -1) if rest.shape[-1] else both
