"""Gated activations."""

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op


def _case(tokens: int, width: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor]:
        return (torch.randn(tokens, 2 * width, generator=generator).to(dtype),)

    return Case(f"{tokens}x{width}", make)


@op([_case(1, 1536), _case(9, 40), _case(64, 256), _case(2, 12288)])
def silu_and_mul(x_T2F: Tensor) -> Tensor:
    """silu(first half) * second half, [T, 2F] -> [T, F]."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return functional.silu(gate_TF) * up_TF


@op([_case(1, 1536), _case(9, 40), _case(64, 256), _case(2, 12288)])
def gelu_tanh_and_mul(x_T2F: Tensor) -> Tensor:
    """gelu(first half) * second half, with the tanh approximation of GELU, [T, 2F] -> [T, F]."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return functional.gelu(gate_TF, approximate="tanh") * up_TF


def _clamped_case(tokens: int, width: int, limit: float, alpha: float = 1.702, shift: float = 1.0) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, float, float, float]:
        x = 3 * torch.randn(tokens, 2 * width, generator=generator)
        return x.to(dtype), limit, alpha, shift

    return Case(f"{tokens}x{width}-limit{limit}-shift{shift}", make)


@op(
    [
        _clamped_case(1, 1440, 7.0),
        _clamped_case(9, 40, 2.5),
        _clamped_case(64, 256, 7.0),
        _clamped_case(9, 2048, 4.0, 1.0, 0.0),
    ]
)
def clamped_swiglu(x_T2F: Tensor, limit: float, alpha: float, shift: float = 1.0) -> Tensor:
    """(up + shift) * gate * sigmoid(alpha * gate), gate the first half, up the second, [T, 2F] -> [T, F].

    gate is clamped to at most `limit`, up to [-limit, limit]. `shift` is 1 in GPT-OSS, 0 in DeepSeek-V4.
    """
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    gate_TF = gate_TF.clamp(max=limit)
    return (up_TF.clamp(-limit, limit) + shift) * (gate_TF * torch.sigmoid(alpha * gate_TF))


def _sigmoid_case(tokens: int, width: int, gates: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(tokens, width, generator=generator).to(dtype)
        return x, torch.randn(tokens, gates + 16, generator=generator).to(dtype)[:, 8:-8]

    return Case(f"{tokens}x{width}by{gates}", make)


@op([_sigmoid_case(1, 4096, 4096), _sigmoid_case(9, 40, 40), _sigmoid_case(64, 256, 1)])
def sigmoid_and_mul(x_TF: Tensor, gate_TG: Tensor) -> Tensor:
    """x * sigmoid(gate), [T, F]; one gate for each feature (G = F) or for each token (G = 1).

    Only the last dimension of the gate must be contiguous.
    """
    return (x_TF.float() * gate_TG.float().sigmoid()).to(x_TF.dtype)
