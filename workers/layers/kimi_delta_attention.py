"""Kimi delta attention: as a gated delta network, with a decay for each feature of the keys.

The inputs of the decays and of the output's gate pass through narrow projections, which every rank has whole;
heads are sharded over the ranks. Keys and values have equally many heads and features.

T tokens, N heads (this rank's), F features of a head, C channels of the convolution (3 N F), X = N F.
"""

from dataclasses import dataclass
from functools import partial

import torch

from atom_ops import (
    DecayWeights,
    StateLayer,
    StatePlan,
    StateShape,
    causal_conv,
    kimi_delta_attention,
    sigmoid_and_mul,
)
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.linear import ColumnParallelLinear, RowParallelLinear, tp_range
from workers.layers.norm import RMSNorm
from workers.layers.weighted import CheckpointTensor, ShardRange, ShardSpec, WeightedLayer

KIMI_DELTA_MODULES = {"delta_proj": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")}
"""Fused modules of `KimiDeltaAttention`, for `packed_modules_mapping`."""


@dataclass(frozen=True)
class KimiDeltaArgs:
    """Sizes of a layer, before sharding."""

    hidden_size: int
    heads: int
    features: int
    """Size of a key, a value, a query and the narrow projections."""
    conv_kernel_size: int
    eps: float

    def local_heads(self, build: BuildContext) -> ShardRange:
        """This rank's heads. Raises ValueError where there are fewer heads than ranks."""
        if build.tp.size > self.heads:
            raise ValueError(
                f"--tensor-parallel-size {build.tp.size} does not fit {self.heads} heads of linear "
                f"attention: it must be at most {self.heads}"
            )
        return tp_range(self.heads, build)


def kimi_state_shape(args: KimiDeltaArgs, build: BuildContext) -> StateShape:
    """Shape of the state per request on this rank."""
    heads = args.local_heads(build).size
    features = args.features
    return StateShape(3 * heads * features, args.conv_kernel_size, heads, features, features, build.dtype)


class KimiDeltaAttention(WeightedLayer):
    """Projections, causal convolution, delta rule, norm and gate of each head, output projection."""

    name_on_disk = "self_attn"

    conv: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(self, args: KimiDeltaArgs, layer: int, group: int, build: BuildContext):
        """`group` is the index of the layer's KV group."""
        super().__init__()
        heads = args.local_heads(build)
        features = heads.scaled(args.features)
        narrow = ShardRange.whole(args.features)
        self._layer = layer
        self._group = group
        self._parts = [3 * features.size, heads.size, args.features, args.features]
        outputs = [features, features, features, heads, narrow, narrow]
        self.delta_proj = ColumnParallelLinear(args.hidden_size, outputs, False, build.at("delta_proj"))
        self.f_b_proj = ColumnParallelLinear(args.features, [features], False, build.at("f_b_proj"))
        self.g_b_proj = ColumnParallelLinear(args.features, [features], False, build.at("g_b_proj"))
        shape = (features.total, 1, args.conv_kernel_size)
        tensors = [CheckpointTensor(f"{part}_conv1d.weight", (shape,)) for part in "qkv"]
        self.add_weight("conv", [ShardSpec(shape, 0, features, tensor) for tensor in tensors], build)
        self.add_weight("A_log", [ShardSpec((1, 1, args.heads, 1), 2, heads)], build, torch.float32)
        self.add_weight("dt_bias", [ShardSpec((features.total,), 0, features)], build, torch.float32)
        self.o_norm = RMSNorm(args.features, args.eps, build)
        self.o_proj = RowParallelLinear(features, args.hidden_size, False, build.at("o_proj"))

    def after_norm(
        self,
        norm: RMSNorm,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TokenMixer`. `rotation` is unused: there is no RoPE here."""
        all_TO, residual_TD = self.delta_proj.after_norm(norm, x_TD, residual_TD)
        qkv_TC, rates_TN, decays_TF, gates_TF = all_TO.split(self._parts, 1)
        steps_TX = self.f_b_proj(decays_TF.contiguous())
        gates_TX = self.g_b_proj(gates_TF.contiguous())
        out_TNF = ctx.mix(self._recur, rotation, qkv_TC, steps_TX, rates_TN)
        normed_TX = self.o_norm(out_TNF.flatten(0, 1)).view(len(x_TD), -1)
        return self.o_proj(sigmoid_and_mul(normed_TX, gates_TX)), residual_TD

    def _recur(
        self,
        ctx: ForwardContext,
        rotation: Rotation,
        qkv_TC: torch.Tensor,
        steps_TX: torch.Tensor,
        rates_TN: torch.Tensor,
    ) -> torch.Tensor:
        states = ctx.kv_layers[self._layer]
        plan = ctx.groups[self._group]
        assert isinstance(states, StateLayer) and isinstance(plan, StatePlan)
        return plan.by_part(partial(self._compute, states), qkv_TC, steps_TX, rates_TN)

    def _compute(
        self,
        states: StateLayer,
        plan: StatePlan,
        qkv_TC: torch.Tensor,
        steps_TX: torch.Tensor,
        rates_TN: torch.Tensor,
    ) -> torch.Tensor:
        mixed_TC = causal_conv(qkv_TC, self.conv.squeeze(1), states.conv, plan)
        decay = DecayWeights(self.A_log.flatten(), self.dt_bias)
        return kimi_delta_attention(mixed_TC, steps_TX, rates_TN, decay, states.recurrent, plan)
