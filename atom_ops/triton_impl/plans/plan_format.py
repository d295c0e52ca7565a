"""What a file of GEMM plans holds, whether it is shipped or was measured on this machine.

{"format": 7, "machine": {"gpu": "NVIDIA H200", "torch": …, "triton": …}, "linear": […], "quantized": […], …}

Sections that are missing are empty: the tuner of a start writes `linear` and `quantized` alone.
"""

import msgspec

from atom_ops.triton_impl.experts.expert_plans import ExpertPlan, Format, Layer
from atom_ops.triton_impl.experts.expert_plans import Shape as ExpertShape
from atom_ops.triton_impl.plans.linear_plans import FusedPlan, Plans
from atom_ops.triton_impl.quantized.quantized_plans import Key as QuantizedKey
from atom_ops.triton_impl.quantized.quantized_plans import QuantizedPlans

__all__ = ["FORMAT", "Content", "Layer", "LinearEntry", "Machine", "QuantizedEntry", "QuantizedKey", "Shape"]

FORMAT = 7
"""To be raised whenever the kernels or the candidate plans change, so that old measurements are not used."""

Shape = tuple[int, int]
"""Output features, input features of a weight."""


class Machine(msgspec.Struct, frozen=True):
    """What the measured times depend on; driver updates are ignored."""

    gpu: str
    """The driver's name of the GPU."""
    torch: str
    triton: str


class LinearEntry(msgspec.Struct):
    """Plans of a 16-bit weight, by rising tokens."""

    outputs: int
    inputs: int
    plans: Plans


class QuantizedEntry(msgspec.Struct):
    """Plans of a quantized weight, by rising tokens."""

    weight: QuantizedKey
    plans: QuantizedPlans


class FusedEntry(msgspec.Struct):
    """The plan of a GEMV that is fused with the op before it."""

    outputs: int
    inputs: int
    plan: FusedPlan


class ExpertEntry(msgspec.Struct):
    """Plans of a layer of experts, by rising tokens."""

    format: Format
    shape: ExpertShape
    plans: tuple[ExpertPlan, ...]


class Content(msgspec.Struct):
    """A whole file."""

    format: int
    machine: Machine
    linear: list[LinearEntry] = []
    quantized: list[QuantizedEntry] = []
    norm_linear: list[FusedEntry] = []
    silu_linear: list[FusedEntry] = []
    experts: list[ExpertEntry] = []


def decode(content: bytes) -> Content:
    """Raises ValueError for a file of another version, or of another form."""
    found = msgspec.json.decode(content, type=Content)
    if found.format != FORMAT:
        raise ValueError(f"its format is {found.format}, this version's {FORMAT}")
    return found
