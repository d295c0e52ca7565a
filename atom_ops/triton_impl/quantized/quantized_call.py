"""One call of `linear` with a quantized weight, alone or after a norm or a gated activation."""

import msgspec
import torch
from torch import Tensor

from atom_ops.ops.elementwise.activation import silu_and_mul
from atom_ops.ops.elementwise.norm import add_rms_norm, rms_norm
from atom_ops.triton_impl.quantized.rounded_rows import Form, RoundedRows, round_rows
from atom_ops.weights import BlockFP8, ChannelFP8, ChannelINT8, FourBitWords

Packed = BlockFP8 | ChannelFP8 | ChannelINT8 | FourBitWords
"""The types of weight that these kernels read."""


class QuantizedCall(msgspec.Struct, frozen=True):
    """Arguments of `linear`, `add_norm_linear` or `silu_and_mul_linear`.

    A Struct, because one is made for each layer of a step: a frozen dataclass takes ten times as long.
    """

    x: Tensor
    """[T, I], or [T, 2I] before a gated activation."""
    weight: Packed
    bias: Tensor | None
    dtype: torch.dtype
    """dtype of the result."""
    gated: bool = False
    """The activation of `x` is multiplied by the weight."""
    residual_TD: Tensor | None = None
    norm_weight_D: Tensor | None = None
    """None: `x` is multiplied as it is."""
    eps: float = 0.0

    def separate(self) -> tuple[Tensor, Tensor]:
        """(norm or activation of x, x + residual), by the ops of their own."""
        if self.gated:
            return silu_and_mul(self.x), self.x
        if self.norm_weight_D is None:
            return self.x.contiguous(), self.x
        if self.residual_TD is None:
            return rms_norm(self.x, self.norm_weight_D, self.eps), self.x
        return add_rms_norm(self.x, self.residual_TD, self.norm_weight_D, self.eps)

    def quantized(self, tile: int, group: int = 0) -> tuple[RoundedRows, Tensor]:
        """(norm or activation of x in 8 bits, x + residual), by one kernel.

        The number of rows is a multiple of `tile`. A scale is for `group` inputs of a token; 0: for all.
        """
        form: Form = "int8" if isinstance(self.weight, ChannelINT8) else "e4m3"
        return round_rows(
            self.x, form, tile, group=group, gated=self.gated, residual_TD=self.residual_TD,
            norm_weight_D=self.norm_weight_D, eps=self.eps,
        )  # fmt: skip

    def new_output(self) -> Tensor:
        """[1, O] for one token, not written yet."""
        return torch.empty(1, self.weight.shape[0], dtype=self.dtype, device=self.x.device)
