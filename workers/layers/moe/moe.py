"""Mixture of experts.

A router selects a few of many small gated MLPs for each token; shared experts run for every token.
Each expert's features are sharded over the tensor-parallel ranks, as those of a dense MLP, unless
whole experts are spread over the expert-parallel ranks (`parallel.expert`).

T tokens, D hidden, X experts, J experts per token, F features of an expert (in `forward` this rank's).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import torch
from torch import nn

from atom_ops import (
    AffineInts,
    ExpertActivation,
    ExpertRole,
    ExpertWeights,
    RoutingRule,
    Weight,
    experts,
    linear,
    pack_expert_weight,
    pack_linear_weight,
    route,
    select_slots,
    sigmoid_and_mul,
    tensors_of,
    weigh_inputs,
    weights_of_experts,
)
from parallel.expert.placement import first_placement
from workers.layers.activation import check_expert_activation, gated_linear
from workers.layers.context import BuildContext
from workers.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, mlp_range, tp_range
from workers.layers.moe.expert_layouts import PER_EXPERT, ExpertLayout, ExpertSizes, Part
from workers.layers.moe.expert_slots import SlotMap
from workers.layers.norm import RMSNorm
from workers.layers.quantization.scheme import PLAIN, Scheme, StoredTensor
from workers.layers.weighted import CheckpointTensor, ShardRange, ShardSpec, WeightedLayer, check_blocks


@dataclass(frozen=True)
class MoEArgs:
    """The parameters of a mixture of experts."""

    hidden_size: int
    num_experts: int
    expert_features: int
    """Intermediate size of one expert."""
    rule: RoutingRule
    hidden_act: str = "silu"
    activation: ExpertActivation = None
    """Replaces `hidden_act` in the routed experts."""
    scales_inputs: bool = False
    """Whether an expert's weight multiplies its input, not its output; with one expert per token."""
    router_bias: bool = False
    router_dtype: torch.dtype | None = None
    """Dtype of the router's logits; None: the model's."""
    correction_bias: bool = False
    """Whether e_score_correction_bias is added to the scores when experts are selected."""
    correction_bias_name: str = "e_score_correction_bias"
    """Its name in the checkpoint, as that of a `CheckpointTensor` of the router."""
    expert_bias: bool = False
    shared_features: int = 0
    """Intermediate size of all shared experts together; 0: no shared experts."""
    shared_gate: bool = False
    """Whether the shared experts' output is multiplied by a sigmoid gate per token."""
    shared_activation: ExpertActivation = None
    """Replaces `hidden_act` in the shared experts."""
    hashed_ids: int = 0
    """Size of a vocabulary whose ids select the experts, by a table of the checkpoint (tid2eid), and not the
    scores; 0: no table."""
    layout: ExpertLayout = PER_EXPERT


class MoE(nn.Module):
    """Router (`gate`), routed experts and shared experts. With `slots`, experts may move between ranks.

    Families whose checkpoints use other names list them in `renamed_on_disk`.
    """

    def __init__(self, args: MoEArgs, build: BuildContext):
        super().__init__()
        if args.scales_inputs and args.rule.top_k != 1:
            raise ValueError(
                f"num_experts_per_tok {args.rule.top_k} is not supported with scaled inputs: 1 is"
            )
        self._scales_inputs = args.scales_inputs
        self._dispatch = build.dispatch
        self._second_stream = build.second_stream
        self.slots = None if build.redundant_experts is None else SlotMap(args.num_experts, build)
        self._num_slots = args.num_experts + (build.redundant_experts or 0)
        self._dispatch.reserve(args.hidden_size, build.dtype, args.rule.top_k, self._num_slots)
        self.gate = ExpertRouter(args, build)
        self.experts = Experts(args, build.at("experts"))
        self.shared_experts = (
            SharedExperts(args, build.at("shared_experts")) if args.shared_features else None
        )
        self.shared_expert_gate = SharedGate(args, build) if args.shared_gate else None

    def after_norm(
        self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed_TD, residual_TD = norm.add_norm(x_TD, residual_TD)
        return self(normed_TD), residual_TD

    def forward(self, x_TD: torch.Tensor, ids_T: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's partial sum of the output; `ids_T` are the tokens' ids, for `MoEArgs.hashed_ids`."""
        topk_ids_TJ, topk_weights_TJ = self.gate.select_experts(x_TD, ids_T)
        if self.slots is not None:
            topk_ids_TJ = select_slots(topk_ids_TJ, self.slots.experts)
        shared = self.shared_experts
        if shared is None:
            return self._routed(x_TD, topk_ids_TJ, topk_weights_TJ)
        # After the router, whose GEMM may be stream-K as those of the shared experts.
        out_TD, shared_TD = self._run_both(
            x_TD,
            lambda: self._routed(x_TD, topk_ids_TJ, topk_weights_TJ),
            lambda: self._shared(shared, x_TD),
        )
        return out_TD + shared_TD

    def _run_both(
        self, x_TD: torch.Tensor, first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._second_stream is None:
            return first(), second()
        return self._second_stream.run_both(len(x_TD), first, second)

    def _routed(
        self, x_TD: torch.Tensor, topk_ids_TJ: torch.Tensor, topk_weights_TJ: torch.Tensor
    ) -> torch.Tensor:
        if self._scales_inputs:
            x_TD, topk_weights_TJ = weigh_inputs(x_TD, topk_weights_TJ)
        routed = self._dispatch.dispatch(x_TD, topk_ids_TJ, topk_weights_TJ, self._num_slots)
        return self._dispatch.combine(self.experts(*routed))

    def _shared(self, shared: "SharedExperts", x_TD: torch.Tensor) -> torch.Tensor:
        if self.shared_expert_gate is None:
            return shared(x_TD)
        return sigmoid_and_mul(shared(x_TD), self.shared_expert_gate(x_TD))


class ExpertRouter(Linear):
    """Selects each token's experts; replicated, so that every rank selects the same."""

    e_score_correction_bias: torch.Tensor | None
    tid2eid: torch.Tensor | None

    def __init__(self, args: MoEArgs, build: BuildContext):
        super().__init__()
        args.rule.check(args.num_experts)
        self._rule = args.rule
        all_experts = ShardRange.whole(args.num_experts)
        # On a GPU `linear` sums products of 16 bits in float32; a CPU would round the sums.
        dtype = None if build.device.type == "cuda" else args.router_dtype
        shard = ShardSpec((args.num_experts, args.hidden_size), 0, all_experts)
        at = build.at("gate")
        scheme = build.quantization.router(at.prefix)
        self.dequantizes = scheme is not PLAIN
        if self.dequantizes:
            self.add_matrix("weight", scheme, [shard], at)
        else:
            self.add_weight("weight", [shard], build, dtype)
        if args.router_bias:
            self.add_weight("bias", [ShardSpec((args.num_experts,), 0, all_experts)], build, dtype)
        self.register_buffer("e_score_correction_bias", None)
        if args.correction_bias:
            # float32: rounding it to 16 bits changes which experts are selected.
            shape = (args.num_experts,)
            tensor = CheckpointTensor(args.correction_bias_name, (shape,))
            correction = [ShardSpec(shape, 0, all_experts, tensor)]
            self.add_weight("e_score_correction_bias", correction, build, torch.float32)
        self.register_buffer("tid2eid", None)
        if args.hashed_ids:
            self.add_weight("tid2eid", [_experts_of_ids(args)], build, torch.int64)
        self._weight_dtype = dtype or build.dtype
        self._logits_dtype = args.router_dtype

    def process_weights_after_loading(self) -> None:
        if self.dequantizes:
            plain = self.dequantized(self.loaded("weight")).to(self._weight_dtype)
            self.set_weight("weight", pack_linear_weight(plain))
        else:
            super().process_weights_after_loading()

    def select_experts(
        self, x_TD: torch.Tensor, ids_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [T, J] and weights [T, J] of the selected experts."""
        logits_TX = linear(x_TD.to(self._weight_dtype), self.weight, self.bias, self._logits_dtype)
        if self.tid2eid is None:
            return route(logits_TX, self._rule, self.e_score_correction_bias)
        assert ids_T is not None, "families with such routers pass the ids"
        topk_ids_TJ = self.tid2eid.index_select(0, ids_T)
        return topk_ids_TJ, weights_of_experts(logits_TX, topk_ids_TJ, self._rule)


def _experts_of_ids(args: MoEArgs) -> ShardSpec:
    """The table with the experts of each id."""

    def fill(table: torch.Tensor, _: float, generator: torch.Generator) -> None:
        first_V = torch.randint(args.num_experts, (len(table), 1), generator=generator, device=table.device)
        steps_J = torch.arange(args.rule.top_k, device=table.device)
        table.copy_((first_V + steps_J) % args.num_experts)

    shape = (args.hashed_ids, args.rule.top_k)
    stored = StoredTensor("", (1, 1), (torch.int64, torch.int32), fill, torch.int64)
    return ShardSpec(
        shape, 0, ShardRange.whole(shape[0]), CheckpointTensor("tid2eid", (shape,)), stored=stored
    )


class Experts(WeightedLayer):
    """The routed experts that this rank has, their matrices stacked; the output is its partial sum.

    Each is in a slot. Without `redundant_experts` slot and expert are the same number.

    Each matrix is a shard of its own, so that loading reads one at a time: gate of expert 0, up of 0,
    gate of 1, … fill the rows of [X * 2F, D], which becomes [X, 2F, D].
    """

    gate_up: Weight
    down: Weight

    def __init__(self, args: MoEArgs, build: BuildContext):
        super().__init__()
        check_expert_activation(args.hidden_act)
        self._activation = args.activation
        num_slots = args.num_experts + (build.redundant_experts or 0)
        self._first, self._count = build.dispatch.local_experts(num_slots)
        self._complete = self._count == num_slots
        # The bias is added once: by the rank that has the whole expert, or by rank 0.
        self._adds_bias = args.expert_bias and (not self._complete or build.tp.rank == 0)
        shards = _ExpertShards(args, build)
        self.add_stacked("gate_up", shards.schemes["gate"], shards.matrices("gate", "up"), build)
        self.add_stacked("down", shards.schemes["down"], shards.matrices("down"), build)
        self.register_buffer("gate_up_bias", None)
        self.register_buffer("down_bias", None)
        if args.expert_bias:
            self.add_weight("gate_up_bias", shards.biases("gate", "up"), build)
            self.add_weight("down_bias", shards.biases("down"), build)

    def process_weights_after_loading(self) -> None:
        with_biases = self.gate_up_bias is not None
        for name in ("gate_up", "down"):
            role = ExpertRole(name == "down", self._activation, with_biases)
            packed = pack_expert_weight(self.loaded(name, self._count), role)
            if isinstance(packed, AffineInts):  # no kernel here reads them
                self.dequantizes = True
                packed = pack_expert_weight(self._plain(packed), role)
            self.set_weight(name, packed)

    def _plain(self, weight: AffineInts) -> torch.Tensor:
        """The numbers [X, O, I]; those of one expert at a time are in memory in float32."""
        numbers = weight.codes.new_empty(weight.shape, dtype=self._dtype)
        for expert in range(self._count):
            numbers[expert] = self.dequantized(weight.expert(expert))
        return numbers

    def forward(
        self, x_TD: torch.Tensor, topk_ids_TJ: torch.Tensor, topk_weights_TJ: torch.Tensor
    ) -> torch.Tensor:
        return experts(x_TD, topk_ids_TJ, topk_weights_TJ, self._weights, self._activation)

    @cached_property
    def _weights(self) -> ExpertWeights:
        """Made in the first step, when the weights are loaded."""
        return ExpertWeights(
            self.gate_up,
            self.down,
            self._by_expert("gate_up_bias") if self.gate_up_bias is not None else None,
            self._by_expert("down_bias") if self._adds_bias else None,
            self._complete,
            self._first,
        )

    def slot_tensors(self) -> list[torch.Tensor]:
        """Views of everything that belongs to an expert, [slots of this rank, ...] each."""
        names = [name for name in ("gate_up_bias", "down_bias") if self.get_buffer(name) is not None]
        matrices = (tensors_of(weight) for weight in (self.gate_up, self.down))
        return [*chain.from_iterable(matrices), *map(self._by_expert, names)]

    def _by_expert(self, name: str) -> torch.Tensor:
        return self.get_buffer(name).unflatten(0, (self._count, -1))


class _ExpertShards:
    """The shards that fill the buffers of `Experts`, in the order of the slots."""

    def __init__(self, args: MoEArgs, build: BuildContext):
        self._layout = args.layout
        self._sizes = ExpertSizes(args.num_experts, args.hidden_size, args.expert_features)
        self._placement = first_placement(args.num_experts, build.redundant_experts or 0)
        first, count = build.dispatch.local_experts(len(self._placement))
        self._local = range(first, first + count)
        gate_up, down = build.quantization.experts(build.prefix, args.layout.matrices, args.num_experts)
        self.schemes: Mapping[Part, Scheme] = {"gate": gate_up, "up": gate_up, "down": down}
        for scheme in (gate_up, down):
            args.layout.check(scheme, build.prefix)
        if count < len(self._placement):
            self._features = ShardRange.whole(args.expert_features)
        else:
            self._features = tp_range(args.expert_features, build, max(*gate_up.unit, *down.unit))
        check_blocks(gate_up, [self._matrix("gate"), self._matrix("up")], build)
        check_blocks(down, [self._matrix("down")], build)

    def matrices(self, *parts: Part) -> Mapping[StoredTensor, list[ShardSpec]]:
        """The shards of each tensor that stores the matrices."""
        return {
            stored: [
                self._stored(part, slot, stored) for slot in range(len(self._placement)) for part in parts
            ]
            for stored in self.schemes[parts[0]].in_checkpoint
        }

    def biases(self, *parts: Part) -> list[ShardSpec]:
        return [self._bias(part, slot) for slot in range(len(self._placement)) for part in parts]

    def _matrix(self, part: Part) -> ShardSpec:
        return ShardSpec(self._sizes.matrix(part), 1 if part == "down" else 0, self._features)

    def _stored(self, part: Part, slot: int, stored: StoredTensor) -> ShardSpec:
        shard = self._matrix(part).of(stored)
        return self._placed(slot, self._layout.matrix(shard, part, self._placement[slot], self._sizes))

    def _bias(self, part: Part, slot: int) -> ShardSpec:
        kept = ShardRange.whole(self._sizes.hidden) if part == "down" else self._features
        shard = ShardSpec(self._sizes.matrix(part)[:1], 0, kept)
        return self._placed(slot, self._layout.bias(shard, part, self._placement[slot], self._sizes))

    def _placed(self, slot: int, shard: ShardSpec) -> ShardSpec:
        """The shard, which is elsewhere for a slot of another rank."""
        if slot in self._local:
            return shard
        return replace(shard, dim=0, kept=ShardRange(shard.shape[0], 0, 0))


class SharedExperts(nn.Module):
    """One gated MLP that runs for every token; the output is this rank's partial sum."""

    def __init__(self, args: MoEArgs, build: BuildContext):
        super().__init__()
        hidden = args.hidden_size
        features = mlp_range(args.shared_features, build)
        self.gate_up_proj = ColumnParallelLinear(
            hidden, [features, features], False, build.at("gate_up_proj")
        )
        self.down_proj = RowParallelLinear(features, hidden, False, build.at("down_proj"))
        self._gated = gated_linear(args.hidden_act, args.shared_activation)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj.after_gate(self._gated, self.gate_up_proj(x_TD))


class SharedGate(Linear):
    """Gate of the shared experts: one number per token, replicated on every rank."""

    def __init__(self, args: MoEArgs, build: BuildContext):
        super().__init__()
        self.add_weight("weight", [ShardSpec((1, args.hidden_size), 0, ShardRange.whole(1))], build)
