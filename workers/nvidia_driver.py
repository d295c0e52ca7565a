"""The NVIDIA GPUs that this process may use, from the driver alone: torch takes seconds to import."""

import ctypes
from dataclasses import dataclass

__all__ = ["Gpu", "nvidia_gpus"]

_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """A GPU; `capability` as (major, minor)."""

    name: str
    capability: tuple[int, int]


def nvidia_gpus(cuda: str) -> list[Gpu]:
    """The visible GPUs, in CUDA's order; `cuda` is the version that torch was built for, such as 13.0.

    Raises OSError, with the cause, if the driver is missing, fails, or is too old for that version.
    """
    driver = _Driver()
    version = driver.number("cuDriverGetVersion")
    if version // 1000 < int(cuda.partition(".")[0]):
        supported = f"{version // 1000}.{version % 1000 // 10}"
        raise OSError(f"the driver supports CUDA {supported}, and the installed torch needs {cuda}")
    if driver.call("cuInit", 0) == _NO_DEVICE:
        return []
    return [_gpu(driver, driver.number("cuDeviceGet", i)) for i in range(driver.number("cuDeviceGetCount"))]


def _gpu(driver: "_Driver", device: int) -> Gpu:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    driver.call("cuDeviceGetName", name, _NAME_BYTES, device)
    major = driver.number("cuDeviceGetAttribute", _CAPABILITY_MAJOR, device)
    minor = driver.number("cuDeviceGetAttribute", _CAPABILITY_MINOR, device)
    return Gpu(name.value.decode(errors="replace"), (major, minor))


class _Driver:
    """Functions of CUDA's driver library. All raise OSError, with the function and its error."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_LIBRARY)

    def call(self, function: str, *arguments: object) -> int:
        """0, or that there is no device."""
        status = int(getattr(self._library, function)(*arguments))
        if status not in (0, _NO_DEVICE):
            raise OSError(f"{function} of {_LIBRARY} returned error {status}")
        return status

    def number(self, function: str, *arguments: object) -> int:
        """What a function stores in the int that is its first parameter."""
        value = ctypes.c_int()
        self.call(function, ctypes.byref(value), *arguments)
        return value.value
