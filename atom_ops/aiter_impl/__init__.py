"""Kernels of AITER, AMD's library for the MI300 and MI350 series.

Each module registers the provider `aiter` for the op file of the same name. AITER is imported by the first
call, never by these modules: the import compiles a module and needs ROCm. Every argument is named, since
their order differs between releases. Nothing here has run on AMD hardware: tests bind each call to the
published signatures (tests/arch/test_contracts.py) and run the calls against AITER's documented semantics
written in torch (tests/aiter_contract).
"""

from importlib.util import find_spec

import torch

from atom.shared.utils import optional_library

TARGETS = ("gfx942", "gfx950")
"""Architectures for which AITER has compiled kernels: MI300X, MI308X, MI325X; MI350X, MI355X."""
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)

NEEDS = "an MI300 or MI350 GPU (gfx942, gfx950) and amd-aiter 0.1.7 or later"


def runs_on(device: torch.device) -> bool:
    """The `supported` check of the providers here."""
    return architecture(device) in TARGETS and find_spec("aiter") is not None and problem(device) is None


def problem(device: torch.device) -> str | None:
    """Why AITER, which is installed, cannot be used on that AMD GPU, and what to do; else None."""
    found = architecture(device)
    if not found or find_spec("aiter") is None:
        return None
    if found not in TARGETS:
        return f"amd-aiter has no kernels for {found}, only for {' and '.join(TARGETS)}: uninstall it"
    return optional_library.problem(optional_library.AITER)


def architecture(device: torch.device) -> str:
    """The name of an AMD GPU's instruction set, such as gfx942; empty for other devices."""
    if device.type != "cuda" or torch.version.hip is None:
        return ""
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    return name.partition(":")[0]


def takes(*tensors: torch.Tensor) -> bool:
    """Whether they have one dtype of AITER's kernels, and numbers: no kernel is made for an empty tensor."""
    dtype = tensors[0].dtype
    return takes_dtype(dtype) and all(each.dtype == dtype and each.numel() > 0 for each in tensors)


def takes_dtype(dtype: torch.dtype) -> bool:
    """Whether AITER has kernels for numbers of this dtype."""
    return dtype in DTYPES


def load() -> None:
    """Register the providers; later calls do nothing."""
    import atom_ops.aiter_impl.activation
    import atom_ops.aiter_impl.attention
    import atom_ops.aiter_impl.experts
    import atom_ops.aiter_impl.fused_linear
    import atom_ops.aiter_impl.latent_attention
    import atom_ops.aiter_impl.latent_cache
    import atom_ops.aiter_impl.latent_queries
    import atom_ops.aiter_impl.linear
    import atom_ops.aiter_impl.norm
    import atom_ops.aiter_impl.rotary
    import atom_ops.aiter_impl.routing
    import atom_ops.aiter_impl.sparse_attention  # noqa: F401
