"""Where the kernels run: a GPU of AMD or NVIDIA, or Triton's interpreter on the CPU."""

import os
from functools import cache

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter on the CPU; Triton reads the variable once, at import."""

NEEDS = "a GPU (or TRITON_INTERPRET=1)"


def runs_on(device: torch.device) -> bool:
    """The `supported` check of the providers here."""
    return device.type == "cuda" or INTERPRETED


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is an H100, H200 or the like, for which some kernels are written."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
    )
