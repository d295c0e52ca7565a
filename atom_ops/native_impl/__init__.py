"""Kernels in C++ for CPUs, compiled on the host that runs them: `kernels.cpp`.

Each module registers the provider `native` for the op file of the same name. Where torch calls several
functions for an op, each of which costs more than its work on a few rows, this is one call.
"""

from collections.abc import Callable
from functools import cache

import torch

from atom_ops.native_impl.build import BuildError, library

NEEDS = "a CPU and a C++ compiler"
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


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


def has(name: str, dtype: torch.dtype) -> bool:
    """Whether the kernel exists for this CPU's instructions."""
    return hasattr(library(), f"atom_{name}_{_SUFFIXES[dtype]}")


def takes(*tensors: torch.Tensor) -> bool:
    """Whether they are contiguous and have one dtype of the kernels."""
    dtype = tensors[0].dtype
    return dtype in _SUFFIXES and all(each.dtype == dtype and each.is_contiguous() for each in tensors)


def call(name: str, dtype: torch.dtype, *args: torch.Tensor | float | None) -> None:
    """Call a kernel; tensors are passed by their addresses."""
    _function(name, dtype)(*[arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args])


@cache
def _function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    function: Callable[..., None] = getattr(library(), f"atom_{name}_{_SUFFIXES[dtype]}")
    return function


def load() -> None:
    """Register the providers; later calls do nothing."""
    import atom_ops.native_impl.activation
    import atom_ops.native_impl.attention
    import atom_ops.native_impl.fused_linear
    import atom_ops.native_impl.linear
    import atom_ops.native_impl.norm
    import atom_ops.native_impl.qkv  # noqa: F401
