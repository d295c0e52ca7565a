"""What the child processes of `atom doctor` are asked, and what they print: one line of JSON each."""

import msgspec


class LibraryLaunch(msgspec.Struct, frozen=True):
    """For `python -m atom.shared.utils.optional_library`: import this module."""

    module: str
    distribution: str
    least: str = ""
    """The oldest version that can be used; empty: any."""


class Library(msgspec.Struct, frozen=True):
    """An optional library."""

    version: str = ""
    error: str = ""
    """Why it cannot be imported, in one line."""


class DevicesLaunch(msgspec.Struct, frozen=True):
    """For `python -m workers.describe_devices`."""

    aiter: Library = Library()
    """What an import of AITER found, which is then not tried again."""


class Gpu(msgspec.Struct, frozen=True):
    """One GPU that torch can use."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: str
    """Compute capability, as 9.0; for AMD the architecture, as gfx942."""


class AmdLaunch(msgspec.Struct, frozen=True):
    """For `python -m atom.commands.amd_gpus`."""


class AmdGpu(msgspec.Struct, frozen=True):
    """One GPU of AMD's driver, whether torch may use it or not."""

    name: str
    architecture: str
    """Name of the architecture, such as gfx942."""
    total_bytes: int
    free_bytes: int


class AmdGpus(msgspec.Struct, frozen=True):
    """What AMD's library amdsmi finds."""

    error: str = ""
    """Why it finds nothing, in one line."""
    gpus: list[AmdGpu] = []
    driver: str = ""
    """Name and version of the driver."""
    rocm: str = ""
    """ROCm's version on this host, which may be another than that of torch; empty: not found."""
    links: list[str] = []
    """How the GPUs are connected, as XGMI: 0-1, 0-2."""


class Devices(msgspec.Struct, frozen=True):
    """torch and what it can compute on."""

    error: str = ""
    """Why torch cannot be used, in one line."""
    torch: str = ""
    """Version with its build: CUDA, ROCm or CPU."""
    gpus: list[Gpu] = []
    gpu_problem: str = ""
    """Why torch cannot use the GPU that the host seems to have."""
    dtypes: list[str] = []
    """Native compute dtypes of the CPU."""
    ops: dict[str, str] = {}
    """Device -> the op providers that run on it, or why none do."""
