"""What is read from CUDA's driver, here a library in its place."""

import ctypes
import types

import pytest

from workers import nvidia_driver
from workers.nvidia_driver import Gpu, nvidia_gpus


class FakeDriver:
    """Has the functions that are called, and GPUs of these capabilities."""

    def __init__(self, capabilities: list[tuple[int, int]], version: int = 13010, init: int = 0):
        self._capabilities = capabilities
        self._version = version
        self._init = init

    def cuDriverGetVersion(self, value: object) -> int:
        return self._store(value, self._version)

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, value: object) -> int:
        return self._store(value, len(self._capabilities))

    def cuDeviceGet(self, value: object, index: int) -> int:
        return self._store(value, index)

    def cuDeviceGetName(self, name: "ctypes.Array[ctypes.c_char]", size: int, device: int) -> int:
        name.value = f"GPU {device}".encode()
        return 0

    def cuDeviceGetAttribute(self, value: object, attribute: int, device: int) -> int:
        return self._store(value, self._capabilities[device][attribute - 75])

    def _store(self, value: object, number: int) -> int:
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = number  # type: ignore[arg-type]
        return 0


def use(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    library = types.SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name: driver})
    monkeypatch.setattr(nvidia_driver, "ctypes", library)


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver([(9, 0), (8, 6)]))
    assert nvidia_gpus("13.0") == [Gpu("GPU 0", (9, 0)), Gpu("GPU 1", (8, 6))]


def test_no_visible_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver([], init=100))
    assert nvidia_gpus("13.0") == []


@pytest.mark.parametrize(
    ("driver", "problem"),
    [
        (
            FakeDriver([(9, 0)], version=12080),
            "supports CUDA 12.8, and the installed torch needs 13.0",
        ),
        (FakeDriver([(9, 0)], init=804), "cuInit of libcuda.so.1 returned error 804"),
    ],
)
def test_a_driver_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, problem: str
) -> None:
    use(monkeypatch, driver)
    with pytest.raises(OSError, match=problem):
        nvidia_gpus("13.0")


def test_a_missing_driver_is_named() -> None:
    with pytest.raises(OSError, match="libcuda"):
        nvidia_gpus("13.0")
