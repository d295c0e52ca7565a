"""The GPU that the package pretends to run on."""

import torch

architecture = "gfx942"
"""Set by `install`."""


def fp8() -> torch.dtype:
    """aiter.dtypes.fp8: the one 8-bit float of its kernels."""
    return torch.float8_e4m3fnuz if architecture == "gfx942" else torch.float8_e4m3fn
