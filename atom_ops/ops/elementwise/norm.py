"""RMS norm."""

import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op


def _cases(with_residual: bool) -> list[Case]:
    def case(hidden: int, *leading: int) -> Case:
        def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor | float, ...]:
            rows = [
                torch.randn(*leading, hidden, generator=generator).to(dtype)
                for _ in range(2 if with_residual else 1)
            ]
            weight = torch.rand(hidden, generator=generator).to(dtype)
            return (*rows, weight, 1e-5)

        return Case("x".join(map(str, (*leading, hidden))), make)

    return [case(576, 1), case(64, 7), case(1024, 33), case(48, 3, 5), case(5120, 2), case(16384, 1)]


def _after_block_case(tokens: int, hidden: int, with_weight: bool, wide: bool = False) -> Case:
    """With a norm of x. `wide`: weights in float32."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor | float | None, ...]:
        x, residual = torch.randn(2, tokens, hidden, generator=generator).to(dtype)
        weight, x_weight = torch.rand(2, hidden, generator=generator).to(torch.float32 if wide else dtype)
        return x, residual, weight if with_weight else None, 1e-5, x_weight

    options = f"{'' if with_weight else '-sum'}{'-float32' if wide else ''}"
    return Case(f"{tokens}x{hidden}-after-norm{options}", make)


@op(_cases(with_residual=False))
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; any leading dimensions.

    Computed in float32 and rounded once, to x's dtype; the weight may have a wider dtype.
    """
    normed = functional.rms_norm(x_TD.float(), weight_D.shape, weight_D.float(), eps)
    return normed.to(x_TD.dtype)


@op(
    [
        *_cases(with_residual=True),
        _after_block_case(7, 64, True),
        _after_block_case(1, 2304, True, wide=True),
        _after_block_case(3, 576, False),
    ]
)
def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, eps: float, x_weight_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total), where total is x + residual, or rms_norm(x) + residual with `x_weight_D`.

    Every result is rounded to x's dtype, also rms_norm(x). Without `weight_D` the first is the total, too.
    """
    if x_weight_D is not None:
        x_TD = rms_norm.reference(x_TD, x_weight_D, eps)
    total_TD = x_TD + residual_TD
    normed_TD = total_TD if weight_D is None else rms_norm.reference(total_TD, weight_D, eps)
    return normed_TD, total_TD


def _gated_case(hidden: int, *leading: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor | float, ...]:
        x, wide = (
            torch.randn(*leading, size, generator=generator).to(dtype) for size in (hidden, 2 * hidden)
        )
        weight = torch.rand(hidden, generator=generator).to(dtype)
        return x, wide[..., hidden:], weight, 1e-5

    return Case("x".join(map(str, (*leading, hidden))), make)


@op([_gated_case(128, 1, 32), _gated_case(16, 7, 3), _gated_case(40, 33)])
def gated_rms_norm(x_TD: Tensor, gate_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate), rounded once. Only the gate's last dimension must be contiguous."""
    normed = functional.rms_norm(x_TD.float(), weight_D.shape, weight_D.float(), eps)
    return (normed * functional.silu(gate_TD.float())).to(x_TD.dtype)
