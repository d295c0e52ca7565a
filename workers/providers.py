"""The ops' providers, as the environment wants them."""

import torch

from atom.shared.utils import envs
from atom_ops import backend


def resolve_ops(device: torch.device, batch_invariant: bool) -> dict[str, tuple[str, ...]]:
    """See `backend.resolve`. ATOM_USE_TRITON_GEMM prefers AITER's Triton GEMM."""
    preferred = ("aiter_triton",) if envs.ATOM_USE_TRITON_GEMM else ()
    return backend.resolve(device, batch_invariant=batch_invariant, preferred=preferred)
