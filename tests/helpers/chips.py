"""Compiling Triton kernels for GPUs that this machine does not have."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Chip:
    """What a kernel is compiled for."""

    number: int
    """Device number: Triton caches compiled kernels by it."""
    target: tuple[str, int | str, int]
    """Triton's backend, architecture and warp size."""
    shared_memory: int
    """Bytes for each program (LDS on AMD)."""


CHIPS = {
    "H200": Chip(100, ("cuda", 90, 32), 227 << 10),
    "MI300": Chip(101, ("hip", "gfx942", 64), 64 << 10),
}


class _Driver:
    """The part of Triton's driver interface that compiling needs."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def get_current_device(self) -> int:
        return self._chip.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*self._chip.target)


@contextmanager
def compiling_for(chip: Chip) -> Iterator[dict[str, int]]:
    """Launches only compile; yields (kernel and settings) -> bytes of shared memory."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch, hip = JITFunction.run, torch.version.hip
    compiled: dict[str, int] = {}

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        made = launch(kernel, *args, grid=grid, warmup=True, **settings)
        name = f"{kernel.__name__} {settings}"
        compiled[name] = max(made.metadata.shared, compiled.get(name, 0))
        return made

    driver.set_active(_Driver(chip))
    JITFunction.run = compile_only
    torch.version.hip = "7.0" if chip.target[0] == "hip" else None
    try:
        yield compiled
    finally:
        JITFunction.run, torch.version.hip = launch, hip
        driver._active = None
