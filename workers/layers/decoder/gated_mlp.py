"""The MLP of most families.

T tokens, D hidden, F features.
"""

import torch
from torch import nn

from workers.layers.activation import gated_linear
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs
from workers.layers.linear import ColumnParallelLinear, RowParallelLinear, mlp_range
from workers.layers.norm import RMSNorm
from workers.layers.weighted import consecutive


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, args: DecoderArgs, build: BuildContext):
        super().__init__()
        hidden = args.hidden_size
        bias = args.mlp_bias
        features = mlp_range(args.intermediate_size, build)
        both = consecutive([features] * 2) if args.mlp_fused_on_disk else [features] * 2
        self.gate_up_proj = ColumnParallelLinear(hidden, both, bias, build.at("gate_up_proj"))
        self.down_proj = RowParallelLinear(features, hidden, bias, build.at("down_proj"))
        self._gated = gated_linear(args.hidden_act)

    def after_norm(
        self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up_T2F, residual_TD = self.gate_up_proj.after_norm(norm, x_TD, residual_TD)
        return self.down_proj.after_gate(self._gated, gate_up_T2F), residual_TD

    def forward(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum of the output."""
        return self.down_proj.after_gate(self._gated, self.gate_up_proj(normed_TD))
