"""What `atom doctor` finds without torch: CPU, memory, links between GPUs, limits, directories, ports."""

import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import msgspec

from atom.shared.utils import envs
from atom.shared.utils.compiler import find_compiler
from atom.shared.utils.optional_library import release

_TOOL_DEADLINE_S = 20.0
_AMD_DRIVER = Path("/sys/module/amdgpu")
_CGROUP = Path("/sys/fs/cgroup")
_SHARED = Path("/dev/shm")
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "amx_bf16": "AMX BF16",
    "asimd": "NEON",
    "bf16": "BF16",
    "sve": "SVE",
}
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NAMES_OF_CPU = ("model name", "Model", "Hardware")


class Cpu(msgspec.Struct, frozen=True):
    """The processor and the memory of the host."""

    name: str
    cores: int
    """Cores that this process may use."""
    instructions: list[str]
    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    """Memory limit of the control group; None: no limit."""
    cpu_quota: float | None
    """Cores that the control group allows; None: no limit."""


class Package(msgspec.Struct, frozen=True):
    """An installed version against the supported range."""

    name: str
    version: str
    """Empty: not installed."""
    needs: str
    """Empty: optional, in any version."""
    fits: bool


class Cache(msgspec.Struct, frozen=True):
    """Where converted models and compiled kernels are kept."""

    path: str
    free_bytes: int
    """Free on its disk for this user."""
    problem: str = ""
    """Why nothing can be written there, in one line."""


class Host(msgspec.Struct, frozen=True):
    """All of it."""

    cpu: Cpu
    driver: str
    """Version of the GPU driver; empty if none was found."""
    links: list[str]
    """How the GPUs are connected, as NV18: 0-1, 0-2."""
    packages: list[Package]
    open_files: tuple[int, int]
    """Soft and hard limit; -1: none."""
    shared_memory_bytes: int | None
    """Free in /dev/shm; None: there is none."""
    port: int
    port_is_free: bool
    visible: dict[str, str] = {}
    """The variables that limit the GPUs which torch finds, as far as they are set."""
    compiler: str = ""
    """The C++ compiler and its version; empty: there is none."""
    cache: Cache | None = None


def find_host(port: int) -> Host:
    """Look at this host; `port` is the HTTP port to try."""
    return Host(
        cpu=find_cpu(),
        driver=_driver(),
        links=_links(),
        packages=[find_package(name) for name in _PACKAGES],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        shared_memory_bytes=shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None,
        port=port,
        port_is_free=_is_free(port),
        visible={name: os.environ[name] for name in _VISIBLE if name in os.environ},
        compiler=_compiler(),
        cache=find_cache(Path(envs.ATOM_CACHE_DIR)),
    )


def has_amd_driver() -> bool:
    """Whether the driver of AMD's GPUs is loaded."""
    return _AMD_DRIVER.is_dir()


def find_cpu(proc: Path = Path("/proc"), group: Path = _CGROUP) -> Cpu:
    """From /proc and the control group."""
    fields = _fields(proc / "cpuinfo")
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    memory = _fields(proc / "meminfo")
    limit, used, quota = (_text(group / name) for name in ("memory.max", "memory.current", "cpu.max"))
    available = _kib(memory.get("MemAvailable", ""))
    bound = int(limit) if limit.isdigit() else None
    if bound is not None and used.isdigit():
        available = max(min(available, bound - int(used)), 0)
    allowed, _, period = quota.partition(" ")
    cores = int(allowed) / int(period) if allowed.isdigit() else None
    usable = len(os.sched_getaffinity(0))
    return Cpu(
        name=next((fields[name] for name in _NAMES_OF_CPU if name in fields), "unknown"),
        cores=usable if cores is None else min(usable, max(1, int(cores))),
        instructions=[text for flag, text in _INSTRUCTIONS.items() if flag in flags],
        total_bytes=_kib(memory.get("MemTotal", "")),
        available_bytes=available,
        limit_bytes=bound,
        cpu_quota=cores,
    )


def find_cache(path: Path) -> Cache:
    """The cache directory; a file is written there, or where it would be made, to see whether that works."""
    existing = next((each for each in (path, *path.parents) if each.exists()), path)
    try:
        free = shutil.disk_usage(existing).free
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"atom")
    except OSError as error:
        return Cache(str(path), 0, f"cannot write to {existing}: {error.strerror}")
    return Cache(str(path), free)


def find_package(name: str) -> Package:
    """Its version, and whether that is at least what our own distribution needs."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = ""
    needs = _needed(name)
    fits = not needs or (bool(version) and release(version) >= release(needs))
    return Package(name, version, needs and f">={needs}", fits)


def parse_links(matrix: str) -> list[str]:
    """The lines of `link_lines` for the output of `nvidia-smi topo -m` or `rocm-smi --showtopotype`."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = [line.split() for line in text.splitlines() if re.match(r"GPU\d+\s", line)]
    return link_lines(
        (kind, row, column)
        for row, cells in enumerate(rows)
        for column, kind in enumerate(cells[1 : len(rows) + 1])
        if column > row
    )


def link_lines(links: Iterable[tuple[str, int, int]]) -> list[str]:
    """For each kind of link the pairs of GPUs that it connects, as `NV18: 0-1, 0-2`."""
    kinds: dict[str, list[str]] = {}
    for kind, first, second in links:
        kinds.setdefault(kind, []).append(f"{first}-{second}")
    if len(kinds) == 1:
        return [f"{kind} between all GPUs" for kind in kinds]
    return [f"{kind}: {', '.join(pairs)}" for kind, pairs in kinds.items()]


def _links() -> list[str]:
    found = _tool("nvidia-smi", "topo", "-m") or _tool("rocm-smi", "--showtopotype")
    return parse_links(found)


def _driver() -> str:
    nvidia = _tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if nvidia:
        return f"NVIDIA {nvidia.splitlines()[0].strip()}"
    amd = _text(_AMD_DRIVER / "version")
    return f"amdgpu {amd}" if amd else ""


def _compiler() -> str:
    command = find_compiler()
    version = _tool(*command, "--version").partition("\n")[0] if command else ""
    return f"{' '.join(command)}{f' ({version})' if version else ''}"


def _tool(*command: str) -> str:
    """What it prints; empty if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _needed(name: str) -> str:
    """The lower bound of a dependency in our own metadata; empty for an optional one."""
    try:
        lines = metadata.requires("atom-serve") or []
    except metadata.PackageNotFoundError:
        return ""
    found = (re.fullmatch(rf"{name}>=([\d.]+)", line.replace(" ", "")) for line in lines)
    return next((each[1] for each in found if each), "")


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("0.0.0.0", port))
            trial.listen(1)
        except OSError:
            return False
        return True


def _fields(path: Path) -> dict[str, str]:
    """The first `name: value` of each name."""
    found: dict[str, str] = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024 if text else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
