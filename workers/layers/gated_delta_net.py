"""Linear attention by gated delta networks: a layer keeps one recurrent state per request.

Checkpoints have the rows of the projections in one of two orders, by key head with its N / K value heads,

    in_proj_qkvz    query | key | values | z        of key head 0, then of key head 1, …
    in_proj_ba      b (beta) | a (decay)

or by kind: in_proj_qkv, in_proj_z, in_proj_b and in_proj_a. Here they are grouped by kind, queries | keys |
values | z | b | a, so that the convolution, the delta rule and the norm each read a contiguous slice. Key
heads are sharded over the ranks.

T tokens, C channels of the convolution, W its kernel size, O features of the projection, K key heads,
N value heads, E key and F value features.
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
    gated_delta_rule,
    gated_rms_norm,
)
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.linear import ColumnParallelLinear, ReorderedLinear, RowParallelLinear, tp_range
from workers.layers.norm import RMSNorm
from workers.layers.quantization.scheme import PLAIN
from workers.layers.weighted import CheckpointTensor, ShardRange, ShardSpec, WeightedLayer

DELTA_MODULES = {"in_proj": ("in_proj_qkvz", "in_proj_ba")}
"""Fused modules of `GatedDeltaNet` with rows by key head, for `packed_modules_mapping`."""
_WIDE = ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z")
_GATES = ("in_proj_b", "in_proj_a")
DELTA_MODULES_BY_KIND = {"in_proj": _WIDE + _GATES, "in_proj_wide": _WIDE, "in_proj_gates": _GATES}
"""Those of one with rows by kind."""


@dataclass(frozen=True)
class DeltaArgs:
    """Sizes of a layer, before sharding."""

    hidden_size: int
    key_heads: int
    value_heads: int
    key_features: int
    value_features: int
    conv_kernel_size: int
    eps: float
    by_kind: bool = False
    """Whether the checkpoint has the rows of the projections by kind, not by key head."""

    def local_heads(self, build: BuildContext) -> tuple[ShardRange, ShardRange]:
        """This rank's key and value heads. Raises ValueError where the heads cannot be sharded."""
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads are not a multiple of {self.key_heads} key heads"
            )
        if build.tp.size > self.key_heads:
            raise ValueError(
                f"--tensor-parallel-size {build.tp.size} does not fit {self.key_heads} key heads of linear "
                f"attention: it must be at most {self.key_heads}"
            )
        keys = tp_range(self.key_heads, build)
        return keys, keys.scaled(self.value_heads // self.key_heads)


def state_shape(args: DeltaArgs, build: BuildContext) -> StateShape:
    """Shape of the state per request on this rank."""
    keys, values = args.local_heads(build)
    channels = 2 * keys.size * args.key_features + values.size * args.value_features
    return StateShape(
        channels, args.conv_kernel_size, values.size, args.key_features, args.value_features, build.dtype
    )


class GatedDeltaNet(WeightedLayer):
    """Input projection, causal convolution, gated delta rule, gated norm, output projection."""

    name_on_disk = "linear_attn"

    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(self, args: DeltaArgs, layer: int, group: int, build: BuildContext):
        """`group` is the index of the layer's KV group."""
        super().__init__()
        _, values = args.local_heads(build)
        self._layer = layer
        self._group = group
        self._heads = values.size
        self._value_features = args.value_features
        self.in_proj, self.in_proj_wide, self.in_proj_gates = _projections(args, build)
        self.conv1d = _Convolution(args, build)
        for name in ("A_log", "dt_bias"):
            self.add_weight(name, [ShardSpec((args.value_heads,), 0, values)], build, torch.float32)
        self.norm = RMSNorm(args.value_features, args.eps, build)
        self.out_proj = RowParallelLinear(
            values.scaled(args.value_features), args.hidden_size, False, build.at("out_proj")
        )

    def after_norm(
        self,
        norm: RMSNorm,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TokenMixer`. `rotation` is unused: there is no RoPE here."""
        wide_TO, gates_T2N, residual_TD = self._project(norm, x_TD, residual_TD)
        values = self._heads * self._value_features
        qkv_TC, z_TO = wide_TO.split([wide_TO.shape[1] - values, values], 1)
        out_TNF = ctx.mix(self._recur, rotation, qkv_TC, gates_T2N)
        z_TNF = z_TO.unflatten(1, (self._heads, self._value_features))
        normed_TNF = gated_rms_norm(out_TNF, z_TNF, self.norm.weight, self.norm.eps)
        return self.out_proj(normed_TNF.flatten(1)), residual_TD

    def _project(
        self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values and z [T, C + N * F]; b and a [T, 2N]; x + residual."""
        if self.in_proj is not None:
            all_TO, residual_TD = self.in_proj.after_norm(norm, x_TD, residual_TD)
            gates = 2 * self._heads
            wide_TO, gates_T2N = all_TO.split([all_TO.shape[1] - gates, gates], 1)
            return wide_TO, gates_T2N, residual_TD
        assert self.in_proj_wide is not None and self.in_proj_gates is not None
        normed_TD, residual_TD = norm.add_norm(x_TD, residual_TD)
        return self.in_proj_wide(normed_TD), self.in_proj_gates(normed_TD), residual_TD

    def _recur(
        self, ctx: ForwardContext, rotation: Rotation, qkv_TC: torch.Tensor, gates_T2N: torch.Tensor
    ) -> torch.Tensor:
        states = ctx.kv_layers[self._layer]
        plan = ctx.groups[self._group]
        assert isinstance(states, StateLayer) and isinstance(plan, StatePlan)
        return plan.by_part(partial(self._compute, states), qkv_TC, gates_T2N)

    def _compute(
        self, states: StateLayer, plan: StatePlan, qkv_TC: torch.Tensor, gates_T2N: torch.Tensor
    ) -> torch.Tensor:
        mixed_TC = causal_conv(qkv_TC, self.conv1d.weight.squeeze(1), states.conv, plan)
        decay = DecayWeights(self.A_log, self.dt_bias)
        return gated_delta_rule(mixed_TC, gates_T2N, decay, states.recurrent, plan)


_Projections = tuple[ColumnParallelLinear | None, ColumnParallelLinear | None, ColumnParallelLinear | None]
"""All in one; or those of queries, keys, values and z, and those of b and a."""


def _projections(args: DeltaArgs, build: BuildContext) -> _Projections:
    """One where it can be. Quantized ones are two, as those of b and a, which are small, often are plain."""
    keys, values = args.local_heads(build)
    hidden = args.hidden_size
    values_of_key = args.value_heads // args.key_heads
    at = build.at("in_proj")
    if not args.by_kind:
        features = 2 * (args.key_features + values_of_key * args.value_features)
        outputs = [keys.scaled(features), keys.scaled(2 * values_of_key)]
        order = _by_kind(keys.size, values_of_key, args)
        return ReorderedLinear(hidden, outputs, False, at, order), None, None
    wide = [*_channels(args, build), values.scaled(args.value_features)]
    gates = [values, values]
    if all(scheme is PLAIN for scheme in build.quantization.parts(at.prefix)):
        return ColumnParallelLinear(hidden, [*wide, *gates], False, at), None, None
    wide_at, gates_at = build.at("in_proj_wide"), build.at("in_proj_gates")
    return (
        None,
        ColumnParallelLinear(hidden, wide, False, wide_at),
        ColumnParallelLinear(hidden, gates, False, gates_at),
    )


def _channels(args: DeltaArgs, build: BuildContext) -> list[ShardRange]:
    """This rank's ranges of queries, of keys and of values, which follow one another in one dimension."""
    keys, values = args.local_heads(build)
    key = keys.scaled(args.key_features)
    value = values.scaled(args.value_features)
    total = 2 * key.total + value.total
    parts = ((0, key), (key.total, key), (2 * key.total, value))
    return [ShardRange(total, first + kept.start, kept.size) for first, kept in parts]


class _Convolution(WeightedLayer):
    """Depthwise kernels of this rank's channels; in the checkpoint one tensor: queries, keys, values."""

    weight: torch.Tensor

    def __init__(self, args: DeltaArgs, build: BuildContext):
        super().__init__()
        channels = _channels(args, build)
        shape = (channels[0].total, 1, args.conv_kernel_size)
        tensor = CheckpointTensor("weight", (shape,))
        self.add_weight("weight", [ShardSpec(shape, 0, kept, tensor) for kept in channels], build)


def _by_kind(key_heads: int, values_of_key: int, args: DeltaArgs) -> torch.Tensor:
    """The order of rows: those of in_proj_qkvz followed by in_proj_ba, grouped by kind."""
    wide = values_of_key * args.value_features
    first = torch.arange(key_heads * 2 * (args.key_features + wide)).view(key_heads, -1)
    second = torch.arange(key_heads * 2 * values_of_key).view(key_heads, -1) + first.numel()
    kinds = (
        *first.split([args.key_features, args.key_features, wide, wide], 1),
        *second.split([values_of_key, values_of_key], 1),
    )
    return torch.cat([kind.flatten() for kind in kinds])
