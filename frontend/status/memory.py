"""Memory of the host and of its GPUs, as the kernel and the GPUs' drivers report it."""

import ctypes
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from atom.shared.utils.logger import get_logger
from frontend.status.records import Gpu, Memory

__all__ = ["MemoryWatch", "gpu_memory", "host_memory"]

_STALE_S = 10.0
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_AMD_CARDS = Path("/sys/class/drm")


class MemoryWatch:
    """The latest figures. They are read in a thread, since a driver that hangs would stop its caller.

    A thread that hangs is the only one: no other is started before it ends, and none keeps the process alive.
    """

    def __init__(self, has_gpus: bool, read_gpus: Callable[[], list[Gpu]] | None = None):
        """`has_gpus`: whether the engines use the GPUs of this host. Tests give another `read_gpus`."""
        self._has_gpus = has_gpus
        self._read_gpus = read_gpus or gpu_memory
        self._thread: threading.Thread | None = None
        self._latest: Memory | None = None
        self._read_at = 0.0
        self._problem = ""

    def latest(self) -> Memory | None:
        """The figures of the call before, and begin to read new ones; None: none of the last 10 seconds."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
            self._thread.start()
        return self._latest if time.monotonic() - self._read_at < _STALE_S else None

    def _run(self) -> None:
        problem = ""
        gpus: list[Gpu] = []
        if self._has_gpus:
            try:
                gpus = self._read_gpus()
            except (OSError, ValueError, AttributeError) as error:  # AttributeError: a library without NVML
                problem = f"the memory of the GPUs: {error}"
        try:
            self._latest = Memory(*host_memory(), gpus)
            self._read_at = time.monotonic()
        except (OSError, ValueError, KeyError) as error:
            problem = f"the memory of this host: {error}"
        if problem and problem != self._problem:
            get_logger().warning("the status page does not show %s", problem)
        self._problem = problem


def host_memory(proc: Path = _PROC, group: Path = _CGROUP) -> tuple[int, int]:
    """(bytes in use, bytes in total) of the host, or of the control group if its limit is smaller.

    Files that the kernel may drop from its cache are not in use.
    """
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    fields = {name: int(value) * 1024 for name, value, *_ in lines}
    used, total = fields["MemTotal:"] - fields["MemAvailable:"], fields["MemTotal:"]
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()).isdigit() and int(text) < total:
        total = int(text)
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
    return used, total


def gpu_memory(cards: Path = _AMD_CARDS) -> list[Gpu]:
    """The memory of each GPU, in the order of the driver. Raises OSError if its driver does not say."""
    found = sorted(cards.glob("card*/device/mem_info_vram_total"))
    if found:
        return [
            Gpu(int(path.with_name("mem_info_vram_used").read_text()), int(path.read_text()))
            for path in found
        ]
    library = _nvml()
    count = ctypes.c_uint()
    _check("nvmlDeviceGetCount_v2", library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    return [_nvidia_gpu(library, index) for index in range(count.value)]


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


@cache
def _nvml() -> ctypes.CDLL:
    """NVIDIA's library, ready for use until the process ends; after an error the next call tries again."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    _check("nvmlInit_v2", library.nvmlInit_v2())
    return library


def _nvidia_gpu(library: ctypes.CDLL, index: int) -> Gpu:
    handle = ctypes.c_void_p()
    memory = _NvmlMemory()
    found = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    _check("nvmlDeviceGetHandleByIndex_v2", found)
    _check("nvmlDeviceGetMemoryInfo", library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
    return Gpu(memory.used, memory.total)


def _check(function: str, result: int) -> None:
    if result:
        raise OSError(f"{function} of NVIDIA's driver has failed with code {result}")
