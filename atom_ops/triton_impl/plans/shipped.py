"""The plans that come with the project: a file for each GPU, in the format of measured files.

    tuned/NVIDIA-H200.json

GPUs of the same chip that differ in memory alone use each other's plans, unless a file has their own name.

A file that was measured on a GPU (see `plan_file`) is added by copying it into `tuned/`, under any name. The
versions of torch and Triton in a shipped file say what it was measured with; it is used with all others too.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from atom_ops.triton_impl.experts.expert_plans import ExpertPlan, Layer
from atom_ops.triton_impl.plans.linear_plans import FusedPlan, Plans
from atom_ops.triton_impl.plans.plan_format import Content, QuantizedKey, Shape, decode
from atom_ops.triton_impl.quantized.quantized_plans import QuantizedPlans

__all__ = ["ShippedPlans", "shipped_on", "shipped_plans"]

_DIRECTORY = Path(__file__).with_name("tuned")
_SAME_CHIP = {
    "NVIDIA H100 80GB HBM3": "NVIDIA H200",
    "NVIDIA GH200 480GB": "NVIDIA H200",
    "NVIDIA GH200 144G HBM3e": "NVIDIA H200",
}
"""The GPU whose plans another one uses: GH100 with 132 SMs, all of them."""


@dataclass(frozen=True, slots=True)
class ShippedPlans:
    """The plans of one GPU model, each table by what its entries are found by."""

    linear: dict[Shape, Plans] = field(default_factory=dict)
    quantized: dict[QuantizedKey, QuantizedPlans] = field(default_factory=dict)
    norm_linear: dict[Shape, FusedPlan] = field(default_factory=dict)
    silu_linear: dict[Shape, FusedPlan] = field(default_factory=dict)
    experts: dict[Layer, tuple[ExpertPlan, ...]] = field(default_factory=dict)

    def add(self, content: Content) -> None:
        """Add a file's entries, in place of earlier ones for the same weight or layer."""
        self.linear.update({(entry.outputs, entry.inputs): entry.plans for entry in content.linear})
        self.quantized.update({entry.weight: entry.plans for entry in content.quantized})
        self.norm_linear.update({(entry.outputs, entry.inputs): entry.plan for entry in content.norm_linear})
        self.silu_linear.update({(entry.outputs, entry.inputs): entry.plan for entry in content.silu_linear})
        self.experts.update({(entry.format, entry.shape): entry.plans for entry in content.experts})


def shipped_on(device: torch.device) -> ShippedPlans:
    """The plans of this GPU's model; none for a CPU."""
    return shipped_plans(torch.cuda.get_device_name(device) if device.type == "cuda" else "")


@cache
def shipped_plans(gpu: str) -> ShippedPlans:
    """The plans of the GPU with this name. Of files for the same GPU a later one, by name, comes first."""
    plans = ShippedPlans()
    for name in (_SAME_CHIP.get(gpu), gpu):
        for content in _files():
            if content.machine.gpu == name:
                plans.add(content)
    return plans


@cache
def _files() -> list[Content]:
    return [decode(path.read_bytes()) for path in sorted(_DIRECTORY.glob("*.json"))]
