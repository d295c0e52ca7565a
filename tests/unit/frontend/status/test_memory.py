"""The memory of the host and of GPUs, from files like the kernel's, and a driver that hangs or fails."""

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.status import memory
from frontend.status.memory import MemoryWatch, gpu_memory, host_memory
from frontend.status.records import Gpu, Memory

DEADLINE_S = 60.0
GIB = 1 << 30


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    text = f"MemTotal: {8 << 20} kB\nMemFree: 5 kB\nMemAvailable: {6 << 20} kB\nHugePages_Total: 0\n"
    return write(tmp_path / "proc", meminfo=text)


def test_the_host_counts_what_is_not_available(proc: Path, tmp_path: Path) -> None:
    assert host_memory(proc, tmp_path / "none") == (2 * GIB, 8 * GIB)


@pytest.mark.parametrize("limit", ["max", str(100 * GIB)])
def test_a_group_without_a_smaller_limit_does_not_count(proc: Path, tmp_path: Path, limit: str) -> None:
    group = write(tmp_path / "group", memory__max=limit)
    assert host_memory(proc, group) == (2 * GIB, 8 * GIB)


def test_a_group_counts_without_its_file_cache(proc: Path, tmp_path: Path) -> None:
    files = {"memory__max": str(4 * GIB), "memory__current": str(3 * GIB)}
    group = write(tmp_path / "group", memory__stat=f"anon 7\ninactive_file {2 * GIB}\n", **files)
    assert host_memory(proc, group) == (GIB, 4 * GIB)


def test_amd_gpus_are_read_from_the_driver_s_files(tmp_path: Path) -> None:
    for card, used in (("card0", 5), ("card1", 6)):
        files = {"mem_info_vram_total": "9", "mem_info_vram_used": str(used)}
        write(tmp_path / card / "device", **files)
    assert gpu_memory(tmp_path) == [Gpu(5, 9), Gpu(6, 9)]


class Nvml:
    """The driver's library with two GPUs; `function` fails."""

    def __init__(self, function: str = ""):
        self.opened = 0
        self._fails = function

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 999 if name == self._fails else self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> int:
        self.opened += name == "nvmlInit_v2"
        match name, arguments:
            case "nvmlDeviceGetCount_v2", (count,):
                count._obj.value = 2
            case "nvmlDeviceGetHandleByIndex_v2", (index, handle):
                handle._obj.value = index.value + 1
            case "nvmlDeviceGetMemoryInfo", (handle, found):
                found._obj.total = 10 * handle.value
                found._obj.used = handle.value
        return 0


@pytest.fixture(autouse=True)
def fresh_library() -> Iterator[None]:
    memory._nvml.cache_clear()
    yield
    memory._nvml.cache_clear()


def test_nvidia_gpus_are_read_by_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    for _ in range(2):
        assert gpu_memory(tmp_path) == [Gpu(1, 10), Gpu(2, 20)]
    assert library.opened == 1


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo"])
def test_a_failure_of_nvml_names_its_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    library = Nvml(function)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    with pytest.raises(OSError, match=f"{function} .* code 999"):
        gpu_memory(tmp_path)


def latest(watch: MemoryWatch) -> Memory:
    """The first figures."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := watch.latest()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_a_host_without_the_driver_s_library_shows_its_own_memory_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def read() -> list[Gpu]:
        raise OSError("no such library")

    watch = MemoryWatch(True, read)
    for _ in range(3):
        found = latest(watch)
        assert watch._thread is not None
        watch._thread.join(DEADLINE_S)
    assert found.total > found.used > 0 and found.gpus == []
    assert caplog.text.count("does not show the memory of the GPUs: no such library") == 1


def test_a_driver_that_hangs_costs_one_thread_and_old_figures_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hang = threading.Event()
    calls = []

    def read() -> list[Gpu]:
        calls.append(1)
        if len(calls) > 1:
            hang.wait(DEADLINE_S)
        return [Gpu(1, 2)]

    watch = MemoryWatch(True, read)
    assert latest(watch).gpus == [Gpu(1, 2)]
    for _ in range(5):
        watch.latest()
    assert len(calls) <= 2
    later = time.monotonic() + 60
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: later))
    assert watch.latest() is None
    hang.set()


def test_without_gpus_no_driver_is_asked() -> None:
    def read() -> list[Gpu]:
        raise AssertionError

    assert latest(MemoryWatch(False, read)).gpus == []
