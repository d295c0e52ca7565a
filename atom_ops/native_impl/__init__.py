"""Kernels in C++ for CPUs, compiled on the host that runs them: `kernels.cpp`.

Each module registers the provider `native` for the op file of the same name. Where torch calls several
functions for an op, each of which costs more than its work on a few rows, this is one call.
"""

import torch

from atom_ops.native_impl.build import BuildError, library
from atom_ops.native_impl.calls import DTYPES, call, has

__all__ = ["NEEDS", "call", "has", "load", "problem", "runs_on", "takes"]

NEEDS = "a CPU and a C++ compiler"


def runs_on(device: torch.device) -> bool:
    """The `supported` check of the providers here; the first call compiles them."""
    return device.type == "cpu" and problem(device) is None


def problem(device: torch.device) -> str | None:
    """Why the kernels cannot be used on that CPU, and what to do; else None."""
    if device.type != "cpu":
        return None
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def takes(*tensors: torch.Tensor) -> bool:
    """Whether they are contiguous and have one dtype of the kernels."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(each.dtype == dtype and each.is_contiguous() for each in tensors)


def load() -> None:
    """Register the providers; later calls do nothing."""
    import atom_ops.native_impl.activation
    import atom_ops.native_impl.attention
    import atom_ops.native_impl.experts
    import atom_ops.native_impl.fused_linear
    import atom_ops.native_impl.linear
    import atom_ops.native_impl.norm
    import atom_ops.native_impl.philox
    import atom_ops.native_impl.qkv  # noqa: F401
