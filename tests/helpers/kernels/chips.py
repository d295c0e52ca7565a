"""Compiling Triton kernels for GPUs that this machine does not have."""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

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

    @property
    def architecture(self) -> str:
        """As gfx942 or sm_90."""
        name = self.target[1]
        return f"sm_{name}" if isinstance(name, int) else name


CHIPS = {
    "H200": Chip(100, ("cuda", 90, 32), 227 << 10),
    "MI300": Chip(101, ("hip", "gfx942", 64), 64 << 10),
    "MI355": Chip(102, ("hip", "gfx950", 64), 160 << 10),
}

L40S = Chip(103, ("cuda", 89, 32), 99 << 10)
"""As all of NVIDIA's GPUs for workstations, it has the least shared memory of all chips with our kernels."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compilation of a kernel needs."""

    kernel: str
    """Module and function."""
    settings: str
    """Constants and options of the launch, as text."""
    warps: int
    shared: int
    """Bytes of shared memory (LDS on AMD) of a program."""
    registers: int
    """Registers of a thread; on AMD vector and accumulation registers."""
    spilled: int
    """Bytes of memory for registers that did not fit, for each thread."""
    shared_polls: int
    """Volatile loads of which several threads load the same place, and may find different values."""


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

    @property
    def utils(self) -> "_Driver":
        """The part of the driver that asks a device."""
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._chip.shared_memory}


@contextmanager
def compiling_for(chip: Chip) -> Iterator[list[Compiled]]:
    """Launches only compile; yields what was compiled, each variant once."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch, hip = JITFunction.run, torch.version.hip
    compiled: list[Compiled] = []
    seen: set[str] = set()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        made = launch(kernel, *args, grid=grid, warmup=True, **settings)
        if made.hash not in seen:
            seen.add(made.hash)
            compiled.append(_described(kernel, made, str(settings)))
        return made

    driver.set_active(_Driver(chip))
    JITFunction.run = compile_only
    torch.version.hip = "7.0" if chip.target[0] == "hip" else None
    try:
        yield compiled
    finally:
        JITFunction.run, torch.version.hip = launch, hip
        driver._active = None


class _SizedError(Exception):
    """Ends a compilation once its shared memory is allocated."""


@contextmanager
def sizing_for(chip: Chip) -> Iterator[dict[str, int]]:
    """Launches compile until shared memory is allocated; yields the most bytes of each kernel.

    LLVM, which comes next, takes most of the time of a compilation, above all for products in float32.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    largest: dict[str, int] = {}
    seen: set[str] = set()
    launch = JITFunction.run

    def size_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        kinds = [getattr(arg, "dtype", type(arg)) for arg in args]
        name = kernel_name(kernel)
        if (variant := f"{name} {settings} {kinds}") in seen:
            return
        seen.add(variant)
        try:
            launch(kernel, *args, grid=grid, warmup=True, **settings)
        except _SizedError as sized:
            largest[name] = max(largest.get(name, 0), *sized.args)

    with compiling_for(chip):
        JITFunction.run = size_only
        knobs.runtime.add_stages_inspection_hook = _stop_before_llvm
        try:
            yield largest
        finally:
            knobs.runtime.add_stages_inspection_hook = None


def _stop_before_llvm(*given: Any) -> tuple[str, str] | None:
    """Triton calls it without arguments for the name of what it does, or with a backend and its stages."""
    if not given:
        return "sized", "sized"
    backend, stages = given[:2]
    allocate_and_more, module = stages["llir"], sys.modules[type(backend).__module__]

    def allocate(source: Any, metadata: dict[str, Any]) -> None:
        with mock.patch.object(module, "llvm") as llvm:
            llvm.init_targets.side_effect = _SizedError
            with suppress(_SizedError):
                allocate_and_more(source, metadata)
                raise AssertionError("Triton calls LLVM in another way: see make_llir of its backends")
        raise _SizedError(source.get_int_attr("ttg.shared"))

    stages["llir"] = allocate
    return None


def kernel_name(kernel: Any) -> str:
    """Module and function, without the package."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def _described(kernel: Any, made: Any, settings: str) -> Compiled:
    amd = "amdgcn" in made.asm
    registers, spilled = _amd_usage(made.asm["amdgcn"]) if amd else _nvidia_usage(made.asm["cubin"])
    return Compiled(
        kernel_name(kernel),
        settings,
        made.metadata.num_warps,
        made.metadata.shared,
        registers,
        spilled,
        _shared_polls(made.asm["ttgir"]),
    )


_POINTERS = re.compile(
    r"tensor<(?P<shape>[\dx]+)x!tt\.ptr<\w+>, (#ttg\.slice<{dim = (?P<cut>\d), parent = )?#(?P<layout>\w+)"
)


def _shared_polls(source: str) -> int:
    """Volatile loads of scalars, or in layouts that repeat elements, in Triton's code for the GPU."""
    layouts = dict(re.findall(r"^#(\w+) = (.+)$", source, re.MULTILINE))
    count = 0
    for line in source.splitlines():
        if "tt.load" in line and "isVolatile = true" in line:
            tensor = _POINTERS.search(line)
            count += tensor is None or _repeats(
                layouts[tensor["layout"]], [int(size) for size in tensor["shape"].split("x")], tensor["cut"]
            )
    return count


def _repeats(layout: str, shape: list[int], cut: str | None) -> bool:
    """Whether several threads hold the same element of a tensor; `cut`: a dimension that it lacks."""

    def numbers(name: str) -> Any:
        found = re.search(rf"\b{name} = (\[.*?\])(, [a-z]|}})", layout)
        assert found is not None, f"no {name} in {layout}"
        return json.loads(found[1])

    if layout.startswith("#ttg.linear"):
        moves = [*numbers("lane"), *numbers("warp")]  # by each bit of a thread's number
        return not all(any(each for dim, each in enumerate(move) if str(dim) != cut) for move in moves)
    assert cut is None, f"a slice of {layout}: add how it is told whether threads share elements"
    if layout.startswith("#ttg.nvidia_mma"):
        sizes = [numbers("warpsPerCTA"), numbers("instrShape")]
    else:
        assert layout.startswith("#ttg.blocked"), layout
        sizes = [numbers("sizePerThread"), numbers("threadsPerWarp"), numbers("warpsPerCTA")]
    whole = [math.prod(each) for each in zip(*sizes, strict=False)]  # an instruction's shape has a third
    return any(size < least for size, least in zip(shape, whole, strict=True))


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Registers, and bytes of scratch memory, from the metadata at the end of the assembly.

    Scalar registers spill into lanes of vector registers. The compiler may still reserve scratch memory, so
    that only memory with an instruction that reads or writes it counts.
    """
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size): +(\d+)", assembly))
    scratch = re.search(r"^\s+scratch_(load|store)", assembly, re.MULTILINE)
    return int(found["vgpr_count"]), int(found["private_segment_fixed_size"]) if scratch else 0


def _nvidia_usage(binary: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack, as cuobjdump prints them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [_cuobjdump(), "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    functions = re.findall(r"REG:(\d+) STACK:(\d+)", printed)  # the kernel, and those that it calls
    return max(int(registers) for registers, _ in functions), max(int(stack) for _, stack in functions)


@cache
def _cuobjdump() -> Path:
    """It comes with Triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
