"""Hyper-connections: a residual stream of N parallel streams, which learned mappings mix around each block.

    streams [T, N, D] ──┬─ hyper_collapse ─► x [T, D] ─ norm ─ block ─► out [T, D]
                        └──── mixed by [N, N] ──── + ◄── hyper_expand ───┘

The mappings of a token come from all of its streams: a projection of them, divided by their root mean square,
gives N weights of the sum x, N factors of the block's output, and the matrix that mixes the streams, which
Sinkhorn's iteration makes doubly stochastic. All of that is computed in float32.

T tokens, N streams, D features of one, M projected features: 2 N + N², or N in the model's head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.tolerances import DEFAULT


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """The learned mappings around a block; all float32."""

    projection_MF: Tensor
    """[M, N * D]."""
    base_M: Tensor
    scale_S: Tensor
    """Factors of the three parts of the projected features; one number in the model's head."""
    norm_eps: float
    eps: float
    """Added to the weights, to the matrix and to what divides it."""
    iterations: int = 0
    """Sinkhorn's iterations."""


def _weights(streams: int, width: int, generator: torch.Generator, head: bool) -> HyperWeights:
    rows = streams if head else streams * (2 + streams)
    return HyperWeights(
        torch.randn(rows, streams * width, generator=generator) * (streams * width) ** -0.5,
        torch.randn(rows, generator=generator),
        torch.rand(1 if head else 3, generator=generator) + 0.5,
        1e-6,
        1e-6,
        0 if head else 20,
    )


def _collapse_case(tokens: int, streams: int, width: int, head: bool = False) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, HyperWeights]:
        x = (2 * torch.randn(tokens, streams, width, generator=generator)).to(dtype)
        return x, _weights(streams, width, generator, head)

    return Case(f"{tokens}x{streams}x{width}", make)


_SIZES = ((1, 4, 4096), (37, 4, 72), (5, 2, 1000), (70, 2, 1030))


def _projected(streams_TND: Tensor, weights: HyperWeights) -> Tensor:
    flat_TF = streams_TND.flatten(1).float()
    norm_T1 = torch.rsqrt(flat_TF.square().mean(-1, keepdim=True) + weights.norm_eps)
    return functional.linear(flat_TF * norm_T1, weights.projection_MF)


def _summed(streams_TND: Tensor, weight_TN: Tensor) -> Tensor:
    return (weight_TN.unsqueeze(-1) * streams_TND).sum(1).to(streams_TND.dtype)


@op([_collapse_case(*sizes) for sizes in _SIZES], DEFAULT)
def hyper_collapse(streams_TND: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor, Tensor]:
    """A block's input [T, D]; the factors of its output [T, N] and the mixing matrices [T, N, N], float32.

    Entry [j, k] of a matrix is the factor of stream j in the new stream k.
    """
    streams = streams_TND.shape[1]
    parts = [streams, streams, streams**2]
    pre, post, mix = _projected(streams_TND, weights).split(parts, -1)
    pre_base, post_base, mix_base = weights.base_M.split(parts)
    pre_scale, post_scale, mix_scale = weights.scale_S
    pre_TN = torch.sigmoid(pre * pre_scale + pre_base) + weights.eps
    post_TN = 2 * torch.sigmoid(post * post_scale + post_base)
    mix_TNN = (mix * mix_scale + mix_base).unflatten(-1, (streams, streams)).softmax(-1) + weights.eps
    mix_TNN = mix_TNN / (mix_TNN.sum(-2, keepdim=True) + weights.eps)
    for _ in range(weights.iterations - 1):
        mix_TNN = mix_TNN / (mix_TNN.sum(-1, keepdim=True) + weights.eps)
        mix_TNN = mix_TNN / (mix_TNN.sum(-2, keepdim=True) + weights.eps)
    return _summed(streams_TND, pre_TN), post_TN, mix_TNN


@op([_collapse_case(*sizes, head=True) for sizes in _SIZES], DEFAULT)
def hyper_head(streams_TND: Tensor, weights: HyperWeights) -> Tensor:
    """The weighted sum of the streams after the last layer, [T, D]."""
    pre_TN = torch.sigmoid(_projected(streams_TND, weights) * weights.scale_S + weights.base_M)
    return _summed(streams_TND, pre_TN + weights.eps)


def _expand_case(tokens: int, streams: int, width: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = torch.randn(tokens, width, generator=generator).to(dtype)
        x = torch.randn(tokens, streams, width, generator=generator).to(dtype)
        post = torch.rand(tokens, streams, generator=generator)
        return out, x, post, torch.rand(tokens, streams, streams, generator=generator) / streams

    return Case(f"{tokens}x{streams}x{width}", make)


@op([_expand_case(*sizes) for sizes in _SIZES], DEFAULT)
def hyper_expand(out_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
    """The streams after a block, [T, N, D]: its output times each stream's factor, and the mixed streams."""
    mixed_TND = torch.bmm(mix_TNN.mT, streams_TND.float())
    return (post_TN.unsqueeze(-1) * out_TD.float().unsqueeze(1) + mixed_TND).to(streams_TND.dtype)
