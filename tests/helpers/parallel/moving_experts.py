"""Run by every rank of one process group: MoE layers whose experts move compute what one process computes."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from atom.shared.config.eplb import EPLBConfig
from atom_ops import RoutingRule
from parallel.communicator import Communicator
from parallel.expert import expert_dispatch
from parallel.mesh import Mesh
from workers import expert_balancer
from workers.expert_balancer import ExpertBalancer
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.layers.moe.moe import MoE, MoEArgs
from workers.weights.loader import load_dummy

HIDDEN, FEATURES, EXPERTS, REDUNDANT = 16, 8, 9, 4
LAYERS = 2
SETTLING = 3
CONFIG = EPLBConfig(window_size=5, step_interval=14, num_redundant_experts=REDUNDANT)
STEPS = 2 * CONFIG.step_interval + SETTLING + 2


class Mixtures(CausalLM):
    """Nothing but MoE layers, with biases, one after another."""

    packed_modules_mapping: ClassVar = {}

    def __init__(self, build: BuildContext):
        super().__init__({}, build)
        args = MoEArgs(HIDDEN, EXPERTS, FEATURES, RoutingRule(2, "softmax"), expert_bias=True)
        self.layers = nn.ModuleList(MoE(args, build.at(f"layers.{number}")) for number in range(LAYERS))
        load_dummy(self, lambda done, total: None)
        for layer in self.layers:  # most tokens select the first experts
            layer.gate.weight += torch.linspace(0.2, -0.2, EXPERTS).unsqueeze(1)

    def forward(self, x_TD: Any, *_: Any) -> Tensor:
        return self.after(x_TD, Communicator())

    def after(self, x_TD: Tensor, tp: Communicator) -> Tensor:
        for layer in self.layers:
            x_TD = x_TD + tp.all_reduce(layer(x_TD).contiguous())
        return x_TD

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        raise NotImplementedError


@torch.inference_mode()
def run(mesh: Mesh) -> tuple[float, float, int]:
    """(imbalance before, after, experts moved). Raises AssertionError where outputs differ."""
    expert_balancer._BYTES_PER_STEP = 0  # two experts at a time: many steps
    expert_balancer.SETTLING_STEPS = SETTLING
    context = BuildContext(torch.float32, mesh.device, Communicator(), 64)
    whole = Mixtures(context)
    dispatch = expert_dispatch(mesh, True, "alltoall")
    model = Mixtures(replace(context, tp=mesh.tp, dispatch=dispatch, redundant_experts=REDUNDANT))
    balancer = ExpertBalancer(model, mesh.ep, CONFIG)
    balancer.copy_replicas()
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    first: list[float] | None = None
    for step in range(STEPS):
        tokens = [5 + (step + rank) % 3 for rank in range(mesh.dp.size)]
        dispatch.plan(tokens, eager=step % 2 == 0)
        x_TD = 0.4 + torch.randn(tokens[mesh.dp.rank], HIDDEN, generator=generator)
        balancer.before_step()
        torch.testing.assert_close(model.after(x_TD, mesh.tp), whole(x_TD), atol=1e-5, rtol=1e-5)
        first = first or balancer.imbalance
    assert first is not None and balancer.imbalance is not None
    return max(first), max(balancer.imbalance), balancer.moved
