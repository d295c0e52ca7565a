"""A mixture of experts in place of a decoder layer's MLP.

A router sends each token to a few of many small gated MLPs; a shared one may see every token.
Over tensor-parallel ranks every expert's features are cut, as a plain MLP's are.

T tokens, D hidden, X experts, J experts per token, F features of an expert (this rank's, in
`forward`).
"""

from dataclasses import dataclass

import torch
from torch import nn

from atom_ops import ExpertActivation, ExpertWeights, RoutingRule, experts, route, sigmoid_and_mul
from workers.layers.activation import gated_linear
from workers.layers.context import BuildContext
from workers.layers.expert_forms import PER_EXPERT, ExpertForm, ExpertSizes, Part
from workers.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, tp_range
from workers.layers.norm import RMSNorm
from workers.layers.weighted import Range, Source, WeightedLayer


@dataclass(frozen=True)
class MoEArgs:
    """What sets one family's mixture apart from another's."""

    hidden_size: int
    num_experts: int
    expert_features: int
    """Intermediate size of one expert."""
    rule: RoutingRule
    hidden_act: str = "silu"
    activation: ExpertActivation = None
    """In place of `hidden_act`, for the routed experts."""
    router_bias: bool = False
    router_dtype: torch.dtype | None = None
    """What the router computes in; None: as the model."""
    correction_bias: bool = False
    """Whether e_score_correction_bias has a say in the choice."""
    expert_bias: bool = False
    shared_features: int = 0
    """Intermediate size of all shared experts together; 0: there are none."""
    shared_gate: bool = False
    """Whether a gate says, token by token, how much of the shared experts counts."""
    form: ExpertForm = PER_EXPERT


class MoE(nn.Module):
    """Its parts are named as on disk: gate, experts, shared_experts.

    A family that calls one differently says so in its `renamed_on_disk`.
    """

    def __init__(self, args: MoEArgs, build: BuildContext):
        super().__init__()
        self._tp = build.tp
        self.gate = Router(args, build)
        self.experts = Experts(args, build)
        self.shared_experts = SharedExperts(args, build) if args.shared_features else None
        self.shared_expert_gate = SharedGate(args, build) if args.shared_gate else None

    def after_norm(
        self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the result for the sum's norm, the sum); without a residual yet the sum is `x_TD` itself."""
        normed_TD, residual_TD = norm.add(x_TD, residual_TD)
        return self(normed_TD), residual_TD

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out_TD = self.experts(x_TD, *self.gate.choose(x_TD))
        if self.shared_experts is not None:
            out_TD = out_TD + self._shared(self.shared_experts, x_TD)
        return self._tp.all_reduce(out_TD)

    def _shared(self, shared: "SharedExperts", x_TD: torch.Tensor) -> torch.Tensor:
        if self.shared_expert_gate is None:
            return shared(x_TD)
        return sigmoid_and_mul(shared(x_TD), self.shared_expert_gate(x_TD))


class Router(Linear):
    """Chooses each token's experts; every rank holds all of it and chooses the same."""

    e_score_correction_bias: torch.Tensor | None

    def __init__(self, args: MoEArgs, build: BuildContext):
        super().__init__()
        args.rule.check(args.num_experts)
        self._rule = args.rule
        everyone = Range.whole(args.num_experts)
        dtype = args.router_dtype
        self.add_weight("weight", [Source((args.num_experts, args.hidden_size), 0, everyone)], build, dtype)
        if args.router_bias:
            self.add_weight("bias", [Source((args.num_experts,), 0, everyone)], build, dtype)
        self.register_buffer("e_score_correction_bias", None)
        if args.correction_bias:
            # Its differences are smaller than 16 bits tell apart.
            correction = [Source((args.num_experts,), 0, everyone)]
            self.add_weight("e_score_correction_bias", correction, build, torch.float32)
        self._dtype = dtype or build.dtype

    def choose(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [T, J] and weights [T, J] of the experts."""
        return route(self(x_TD.to(self._dtype)), self._rule, self.e_score_correction_bias)


class Experts(WeightedLayer):
    """All experts' matrices, side by side; the result is this rank's part of the sum.

    Each matrix is a source of its own, so that no more than one is ever read at a time: gate of
    expert 0, up of 0, gate of 1, … fill the rows of [X * 2F, D], which is [X, 2F, D].
    """

    def __init__(self, args: MoEArgs, build: BuildContext):
        super().__init__()
        gated_linear(args.hidden_act)  # raises for one that `experts` does not run
        self._activation = args.activation
        self._count = args.num_experts
        # Of the partial sums one holds it.
        self._adds_bias = args.expert_bias and build.tp.rank == 0
        sources = _ExpertSources(args, build)
        self.add_weight("gate_up", sources.matrices("gate", "up"), build)
        self.add_weight("down", sources.matrices("down"), build)
        self.register_buffer("gate_up_bias", None)
        self.register_buffer("down_bias", None)
        if args.expert_bias:
            self.add_weight("gate_up_bias", sources.biases("gate", "up"), build)
            self.add_weight("down_bias", sources.biases("down"), build)

    def forward(self, x_TD: torch.Tensor, ids_TJ: torch.Tensor, weights_TJ: torch.Tensor) -> torch.Tensor:
        weights = ExpertWeights(
            self._by_expert("gate_up"),
            self._by_expert("down"),
            self._by_expert("gate_up_bias") if self.gate_up_bias is not None else None,
            self._by_expert("down_bias") if self._adds_bias else None,
        )
        return experts(x_TD, ids_TJ, weights_TJ, weights, self._activation)

    def _by_expert(self, name: str) -> torch.Tensor:
        return self.get_buffer(name).unflatten(0, (self._count, -1))


class _ExpertSources:
    """What is read into the buffers of `Experts`, in the order of the experts."""

    def __init__(self, args: MoEArgs, build: BuildContext):
        self._form = args.form
        self._sizes = ExpertSizes(args.num_experts, args.hidden_size, args.expert_features)
        self._features = tp_range(args.expert_features, build)

    def matrices(self, *parts: Part) -> list[Source]:
        return [self._matrix(part, expert) for expert in range(self._sizes.experts) for part in parts]

    def biases(self, *parts: Part) -> list[Source]:
        return [self._bias(part, expert) for expert in range(self._sizes.experts) for part in parts]

    def _matrix(self, part: Part, expert: int) -> Source:
        stored = self._form.matrix(part, expert, self._sizes)
        return Source(self._sizes.matrix(part), 1 if part == "down" else 0, self._features, *stored)

    def _bias(self, part: Part, expert: int) -> Source:
        stored = self._form.bias(part, expert, self._sizes)
        kept = Range.whole(self._sizes.hidden) if part == "down" else self._features
        return Source(self._sizes.matrix(part)[:1], 0, kept, *stored)


class SharedExperts(nn.Module):
    """One gated MLP that every token passes; the result is this rank's part of the sum."""

    def __init__(self, args: MoEArgs, build: BuildContext):
        super().__init__()
        hidden, features = args.hidden_size, tp_range(args.shared_features, build)
        self.gate_up_proj = ColumnParallelLinear(hidden, [features, features], False, build)
        self.down_proj = RowParallelLinear(features, hidden, False, build, reduce=False)
        self._gated = gated_linear(args.hidden_act)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj.after_gate(self._gated, self.gate_up_proj(x_TD))


class SharedGate(Linear):
    """One number a token, the same on every rank."""

    def __init__(self, args: MoEArgs, build: BuildContext):
        super().__init__()
        self.add_weight("weight", [Source((1, args.hidden_size), 0, Range.whole(1))], build)
