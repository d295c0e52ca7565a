"""Hardware and software that a figure was measured on."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

from atom.shared.utils.version import atom_version

__all__ = ["hardware", "software"]

_DRIVERS = ("nvidia", "amdgpu")
_LIBRARIES = ("torch", "triton")


def hardware(gpus: list[str]) -> str:
    """The GPUs' names and driver, or the CPU's name."""
    if not gpus:
        return f"CPU: {_cpu_name()}, {len(os.sched_getaffinity(0))} cores"
    count = f"{len(gpus)} x " if len(gpus) > 1 else ""
    modules = [(name, Path("/sys/module") / name / "version") for name in _DRIVERS]
    drivers = [f"driver {path.read_text().strip()}" for _, path in modules if path.exists()]
    return ", ".join([count + gpus[0], *drivers, f"{len(os.sched_getaffinity(0))} CPU cores"])


def software() -> str:
    """Versions of ATOM and its libraries."""
    libraries = [f"{name} {found}" for name in _LIBRARIES if (found := _version(name))]
    return ", ".join([f"ATOM {atom_version()}", f"Python {python_version()}", *libraries])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
