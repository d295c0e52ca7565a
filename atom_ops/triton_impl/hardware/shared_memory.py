"""What fits in the shared memory of a program, which AMD calls LDS.

Triton refuses to launch a kernel whose tiles take more. So launches whose tiles depend on a model's widths, or
on its dtype, count the bytes of their tiles here.
"""

from collections.abc import Callable
from functools import cache

import torch
from triton.runtime import driver

from atom_ops.triton_impl.hardware.target import INTERPRETED

_INTERPRETED = 227 << 10
_LEAST = 16
"""The smallest side of a tile that tl.dot multiplies."""


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if INTERPRETED:
        return _INTERPRETED
    return _bytes(driver.active.get_current_device() if device.index is None else device.index)


@cache
def _bytes(number: int) -> int:
    return int(driver.active.utils.get_device_properties(number)["max_shared_mem"])


def fitting_stages(most: int, stage: int, device: torch.device) -> int:
    """The most stages of a loop whose tiles take `stage` bytes in each of them.

    On NVIDIA all of them may be in shared memory, as WGMMA reads a stage while the others are loaded. On AMD one
    of them is in registers.
    """
    stages = shared_memory(device) // stage + (torch.version.hip is not None)
    return max(1, min(most, stages))


def fitting_block(block: int, size: Callable[[int], int], device: torch.device) -> int:
    """`block`, or as many times half of it as are needed for tiles of `size(block)` bytes to fit."""
    while block > _LEAST and size(block) > shared_memory(device):
        block //= 2
    return block
