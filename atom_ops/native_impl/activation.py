"""Gated activations."""

from torch import Tensor

from atom_ops.native_impl import NEEDS, call, runs_on, takes
from atom_ops.ops.elementwise.activation import gelu_tanh_and_mul, silu_and_mul


@silu_and_mul.provider("native", needs=NEEDS, supported=runs_on, supports=lambda x_T2F: takes(x_T2F))
def _silu_and_mul(x_T2F: Tensor) -> Tensor:
    return _gated("silu_and_mul", x_T2F)


@gelu_tanh_and_mul.provider("native", needs=NEEDS, supported=runs_on, supports=lambda x_T2F: takes(x_T2F))
def _gelu_tanh_and_mul(x_T2F: Tensor) -> Tensor:
    return _gated("gelu_tanh_and_mul", x_T2F)


def _gated(kernel: str, x_T2F: Tensor) -> Tensor:
    size = x_T2F.shape[-1] // 2
    out_TF = x_T2F.new_empty(*x_T2F.shape[:-1], size)
    call(kernel, x_T2F.dtype, x_T2F, out_TF, out_TF.numel() // size, size)
    return out_TF
