"""`atom doctor`: what this machine has, and whether a model can be served on it.

Everything that imports torch or another library runs in a child process with a deadline, so that a
crash or a hang there is a line of the report.
"""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec

from atom.commands.doctor_report import Report, report_text
from atom.commands.host import Cache, Host, find_host, has_amd_driver
from atom.shared.messages.doctor import AmdGpus, AmdLaunch, Devices, DevicesLaunch, Library
from atom.shared.utils import optional_library
from atom.shared.utils.errors import one_line
from atom.shared.utils.open_files import NEEDED_FILES
from atom.shared.utils.process import last_line, spawn
from atom.shared.utils.run_directory import RunDirectory
from atom.supervisor.child import how_it_ended

DEADLINE_S = 120.0
_HUB_DEADLINE_S = 10.0
_LIBRARIES = {"AITER": optional_library.AITER, "MORI": optional_library.MORI}
_LEAST_MEMORY = 1 << 30
_LEAST_DISK = 1 << 30
_SHARED_MEMORY = 1 << 28
"""NCCL's buffers for the GPUs of one host."""

R = TypeVar("R", Devices, Library, AmdGpus)


def run(port: int, tries_hub: bool, as_json: bool) -> int:
    """Print the report; returns 0 if a model can be served, else 1."""
    report = examine(port, tries_hub)
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else report_text(report))
    return 0 if report.can_serve else 1


def examine(port: int, tries_hub: bool) -> Report:
    """Look at this machine; takes seconds, or some minutes where an import hangs."""
    deadline = time.monotonic() + optional_library.DEADLINE_S
    libraries = {
        name: _start("atom.shared.utils.optional_library", launch, Library, deadline)
        for name, launch in _LIBRARIES.items()
    }
    amd = _start("atom.commands.amd_gpus", AmdLaunch(), AmdGpus, deadline) if has_amd_driver() else None
    imported = {name: result() for name, result in libraries.items()}
    # Only now, because torch's providers depend on AITER, and its import may hang or crash.
    launch = DevicesLaunch(imported["AITER"])
    devices = _start("workers.describe_devices", launch, Devices, time.monotonic() + DEADLINE_S)
    host = find_host(port)
    hub = reach_hub() if tries_hub else None
    found = devices()
    problems = [*_problems(host, found), *_unusable_directories(host.cache)]
    warnings = [*_warnings(host, found), *_unusable_libraries(found, imported)]
    known = amd() if amd is not None else None
    return Report(not problems, problems, warnings, host, found, imported, hub, known)


def _start(module: str, launch: msgspec.Struct, kind: type[R], deadline: float) -> Callable[[], R]:
    """Start a child; the function that is returned waits for its result."""
    child = spawn(module, launch, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return partial(_result, child, kind, deadline)


def _result(child: "subprocess.Popen[bytes]", kind: type[R], deadline: float) -> R:
    """What the child found; an error instead if it crashed or hangs."""
    try:
        return msgspec.json.decode(last_line(child, deadline), type=kind)
    except TimeoutError:
        return kind(error="the import did not end in time")
    except msgspec.DecodeError:
        return kind(error=f"the import crashed: {how_it_ended(child.returncode)}")


def reach_hub() -> str:
    """One line on whether the hub responds."""
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_HUB_DEADLINE_S):
            return f"{url} responds"
    except urllib.error.HTTPError as error:
        return f"{url} responds with status {error.code}"
    except (OSError, ValueError) as error:
        return f"{url} cannot be reached: {one_line(error, OSError, ValueError)}"


def _problems(host: Host, devices: Devices) -> Iterator[str]:
    """Each with what to do."""
    if devices.error:
        yield f"torch cannot be used ({devices.error}): install it again, as README.md says"
    for package in host.packages:
        if not package.fits:
            found = f"{package.version} is too old" if package.version else "is missing"
            yield f"{package.name} {found}: pip install '{package.name}{package.needs}'"
    for device, ops in devices.ops.items():
        if ops.startswith("none: "):
            yield f"no ops run on {device} ({ops.removeprefix('none: ')})"
    hard = host.open_files[1]
    if 0 <= hard < NEEDED_FILES:
        yield f"only {hard} files may be open: raise the hard limit to {NEEDED_FILES} or more (ulimit -Hn)"


def _warnings(host: Host, devices: Devices) -> Iterator[str]:
    if devices.gpu_problem:
        yield f"only the CPU is used: {devices.gpu_problem}"
    if host.driver and not devices.gpus and not devices.gpu_problem and not devices.error:
        yield f"there is a GPU driver ({host.driver}), but torch finds no GPU"
    if host.cpu.available_bytes < _LEAST_MEMORY:
        yield f"only {host.cpu.available_bytes >> 20} MiB of memory are available"
    if host.cache is not None and not host.cache.problem and host.cache.free_bytes < _LEAST_DISK:
        yield (
            f"only {host.cache.free_bytes >> 20} MiB are free in {host.cache.path}, for converted models and "
            "compiled kernels: set ATOM_CACHE_DIR to a directory on another disk"
        )
    if not host.compiler and not devices.gpus:
        yield "there is no C++ compiler, so the CPU runs without ATOM's kernels: install one, such as g++"
    if not host.port_is_free:
        yield f"port {host.port} is in use: choose another --server-port"
    shared = host.shared_memory_bytes
    if len(devices.gpus) > 1 and (shared is None or shared < _SHARED_MEMORY):
        least = _SHARED_MEMORY >> 20
        yield f"/dev/shm has less than {least} MiB, which -tp needs: start the container with --shm-size"
    if devices.dtypes == ["float32"] and not devices.gpus:
        yield "the CPU has no 16-bit arithmetic: models run in float32 on it"


def _unusable_libraries(devices: Devices, libraries: dict[str, Library]) -> Iterator[str]:
    """AMD's libraries on a host with AMD's GPUs; elsewhere their imports fail, and nothing uses them."""
    if any(gpu.capability.startswith("gfx") for gpu in devices.gpus):
        for name, library in libraries.items():
            if library.error and library.error != optional_library.NOT_INSTALLED:
                yield f"{name} is not used: {optional_library.explained(_LIBRARIES[name], library)}"


def _unusable_directories(cache: Cache | None) -> Iterator[str]:
    """The directories that every start writes to."""
    try:
        RunDirectory().close()
    except OSError as error:
        yield f"no directory for sockets: {one_line(error, OSError)}; set TMPDIR to a writable directory"
    if cache is not None and cache.problem:
        yield f"{cache.problem}: set ATOM_CACHE_DIR to a writable directory"
