"""Kernels in Triton: one source for AMD and NVIDIA GPUs.

Each module stands beside the op file of its name and registers the provider `triton`. Triton
is imported by these modules alone, and they by `load` alone: a machine without it does without.
The kernels allocate their results and nothing else and never wait for the device, so that any
sequence of them can be captured in a graph.
"""

import os
from importlib.util import find_spec

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run as numpy programs on the CPU; Triton settles it when they are defined, so once."""

NEEDS = "a GPU (or TRITON_INTERPRET=1)"


def runs_on(device: torch.device) -> bool:
    """The static check of every provider here."""
    return device.type == "cuda" or INTERPRETED


def load() -> None:
    """Register the providers, where triton is installed; later calls do nothing."""
    if find_spec("triton") is None:
        return
    import atom_ops.triton_impl.activation
    import atom_ops.triton_impl.attention
    import atom_ops.triton_impl.batch_invariant
    import atom_ops.triton_impl.causal_conv
    import atom_ops.triton_impl.decode_inputs
    import atom_ops.triton_impl.embedding
    import atom_ops.triton_impl.fused_attention
    import atom_ops.triton_impl.fused_linear
    import atom_ops.triton_impl.gated_delta_rule
    import atom_ops.triton_impl.index_keys
    import atom_ops.triton_impl.kv_cache
    import atom_ops.triton_impl.latent_attention
    import atom_ops.triton_impl.latent_cache
    import atom_ops.triton_impl.latent_heads
    import atom_ops.triton_impl.linear
    import atom_ops.triton_impl.norm
    import atom_ops.triton_impl.prompt_attention
    import atom_ops.triton_impl.qkv
    import atom_ops.triton_impl.rotary
    import atom_ops.triton_impl.sampling
    import atom_ops.triton_impl.sparse_attention  # noqa: F401
