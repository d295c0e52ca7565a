"""What fits in the shared memory of a program, which AMD calls LDS.

Triton refuses to launch a kernel whose tiles take more. So launches whose tiles depend on a model's widths or
dtype count their bytes.
"""

from collections.abc import Callable
from functools import cache

import torch
from triton.runtime import driver

from atom_ops.triton_impl.hardware.target import INTERPRETED

_UNLIMITED = 1 << 40
"""In the interpreter."""
_WITH_WGMMA = (9, 10)
"""Major compute capabilities; those of workstations, as 12, have the products of Ampere."""
_LEAST = 16
"""The smallest side of a tile that tl.dot multiplies."""


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if INTERPRETED:
        return _UNLIMITED
    return _bytes(_number(device))


def _number(device: torch.device) -> int:
    if INTERPRETED:
        return 0
    return int(driver.active.get_current_device()) if device.index is None else device.index


@cache
def _waits_for_products(number: int) -> bool:
    """Whether warps may go on while a product is computed: on Hopper, and later."""
    if INTERPRETED:
        return True
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch // 10 in _WITH_WGMMA


@cache
def _bytes(number: int) -> int:
    return int(driver.active.utils.get_device_properties(number)["max_shared_mem"])


def product_bytes(rows: int, columns: int, inputs: int, dtype: torch.dtype) -> int:
    """Bytes of both operands of a tl.dot outside of a loop with stages.

    On AMD they go through the same memory, one after the other.
    """
    lines = max(rows, columns) if torch.version.hip is not None else rows + columns
    return lines * inputs * dtype.itemsize


def buffers(stages: int, device: torch.device) -> int:
    """How many of a loop's stages have their tiles in shared memory at a time.

    One more is in registers, or multiplied by WGMMA, which reads it from shared memory, too.
    """
    return stages if _waits_for_products(_number(device)) else max(stages - 1, 1)


def fitting_stages(most: int, stage: int, device: torch.device, rest: int = 0) -> int:
    """The most stages of a loop whose tiles take `stage` bytes in each, besides `rest` bytes."""
    stages = most
    while stages > 1 and rest + buffers(stages, device) * stage > shared_memory(device):
        stages -= 1
    return stages


def fitting_block(block: int, size: Callable[[int], int], device: torch.device) -> int:
    """`block`, or as many times half of it as are needed for tiles of `size(block)` bytes to fit."""
    while block > _LEAST and size(block) > shared_memory(device):
        block //= 2
    return block
