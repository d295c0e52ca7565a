"""Rotary position embedding (RoPE)."""

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import EXACT


def _case(heads: int, head_dim: int, rot_dim: int, interleaved: bool) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, bool]:
        x = torch.randn(11, heads + 2, head_dim, generator=generator).to(dtype)[:, 1:-1]
        angles = torch.rand(11, 1, rot_dim // 2, generator=generator) * 6.3
        return x, *rotation(angles.cos(), angles.sin(), interleaved), interleaved

    layout = "interleaved" if interleaved else "halves"
    return Case(f"{heads}x{head_dim}r{rot_dim}-{layout}", make)


def rotation(cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Cosines and sines as `rotary` takes them, from one of each per pair: [..., R/2] -> [..., R].

    The cosine of a pair is repeated; its sine is negated for the pair's first feature.
    """
    if interleaved:
        return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _table_case(positions: int, tokens: int, head_dim: int, interleaved: bool = False) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, bool]:
        table = torch.randn(positions, head_dim, generator=generator)
        return table, torch.randint(0, positions, (tokens,), generator=generator), interleaved

    return Case(f"{tokens}of{positions}x{head_dim}{'-interleaved' if interleaved else ''}", make)


@op([_table_case(40, 1, 64), _table_case(300, 23, 80), _table_case(300, 9, 64, interleaved=True)], EXACT)
def rotation_at(cos_sin_PR: Tensor, positions_T: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """(cos, sin) of each token, [T, 1, R] each as `rotation` returns them.

    A row of the float32 table holds a position's cosines, then its sines.
    """
    cos_T1r, sin_T1r = cos_sin_PR.index_select(0, positions_T).unsqueeze(1).chunk(2, dim=-1)
    return rotation(cos_T1r, sin_T1r, interleaved)


@op([_case(9, 64, 64, False), _case(4, 32, 16, False), _case(4, 32, 32, True), _case(5, 80, 80, False)])
def rotary(x_THE: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool = False) -> Tensor:
    """RoPE on the first R of the E features of every head.

    Cosines and sines are float32, as `rotation` returns them. Pair i is features (i, i + R/2), or
    (2i, 2i + 1) if `interleaved`. Computed in float32. Only the last dimension of `x_THE` must be
    contiguous.
    """
    rot_dim = cos_T1R.shape[-1]
    rotary_part = x_THE[..., :rot_dim]
    rest = x_THE[..., rot_dim:]
    if interleaved:
        exchanged = rotary_part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        exchanged = rotary_part.roll(rot_dim // 2, -1)
    both = (rotary_part * cos_T1R).addcmul_(exchanged, sin_T1R).to(x_THE.dtype)
    return torch.cat((both, rest), -1) if rest.shape[-1] else both
