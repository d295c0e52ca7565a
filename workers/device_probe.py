"""The capabilities of this host. torch is imported only if device files indicate a GPU, and it is ROCm's."""

import os
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

from atom.shared.config.resolve import DeviceCapabilities
from atom.shared.utils.errors import one_line
from workers.nvidia_driver import Gpu, nvidia_gpus

_GPU_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")

# Names in /proc/cpuinfo: x86 calls the line "flags", ARM "Features".
_CPU_DTYPE_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}

# Values of ONEDNN_MAX_CPU_ISA, which limits the instructions that oneDNN uses, and so its 16 bit matmuls.
_ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_ISA_WITHOUT_16_BITS = {
    "sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni",
}  # fmt: skip
_ISA_WITHOUT_FLOAT16 = _ISA_WITHOUT_16_BITS | {"avx512_core_bf16"}

_CPU_INFO = Path("/proc/cpuinfo")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_FIRST_NVIDIA_WITH_BF16 = (8, 0)


def probe() -> DeviceCapabilities:
    """The host's capabilities; takes seconds with ROCm, because torch is imported."""
    cpu_dtypes = [*cpu_dtypes_of(_cpu_flags(), _onednn_limit()), "float32"]
    if not any(glob(pattern) for pattern in _GPU_DEVICE_FILES):
        return DeviceCapabilities(cpu_dtypes=cpu_dtypes, cpu_cores=cpu_cores())
    return _probe_gpus(cpu_dtypes)


def cpu_dtypes_of(flags: set[str], onednn_limit: str = "") -> list[str]:
    """The 16 bit dtypes that a CPU with these feature flags has arithmetic for.

    `onednn_limit`: value of ONEDNN_MAX_CPU_ISA; empty: no limit.
    """
    limited = {"bfloat16": _ISA_WITHOUT_16_BITS, "float16": _ISA_WITHOUT_FLOAT16}
    return [
        dtype
        for dtype, wanted in _CPU_DTYPE_FLAGS.items()
        if wanted & flags and onednn_limit.lower() not in limited[dtype]
    ]


def _onednn_limit() -> str:
    return next((os.environ[name] for name in _ONEDNN_LIMITS if os.environ.get(name)), "")


def cpu_cores() -> int:
    """Cores that this process may use: the minimum of its affinity and the container's quota."""
    cores = len(os.sched_getaffinity(0))
    if _CPU_QUOTA.exists():
        quota, period = _CPU_QUOTA.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _cpu_flags() -> set[str]:
    if not _CPU_INFO.exists():
        return set()
    for line in _CPU_INFO.read_text().splitlines():
        label, _, flags = line.partition(":")
        if label.strip() in ("flags", "Features"):
            return set(flags.split())
    return set()


def _probe_gpus(cpu_dtypes: list[str]) -> DeviceCapabilities:
    build = _torch_build()
    rocm = build["hip"] is not None
    gpus: list[Gpu] = []
    problem = "the installed torch is a CPU build"
    if rocm or build["cuda"] is not None:
        problem = "torch cannot use any"
        try:
            gpus = _torchs_gpus() if rocm else nvidia_gpus(build["cuda"])
        except OSError as error:
            gpus = _torchs_gpus()  # it has the last word
            problem += f": {one_line(error, OSError)}"
    capable = [rocm or gpu.capability >= _FIRST_NVIDIA_WITH_BF16 for gpu in gpus]
    return DeviceCapabilities(
        cuda=len(gpus),
        rocm=rocm,
        names=[gpu.name for gpu in gpus],
        gpu_dtypes=_gpu_dtypes(capable),
        gpu_problem="" if gpus else f"GPU device files exist, but {problem}",
        cpu_dtypes=cpu_dtypes,
        cpu_cores=cpu_cores(),
    )


def _torchs_gpus() -> list[Gpu]:
    """The GPUs that torch can use, NVIDIA's or AMD's."""
    import torch

    cuda = torch.cuda
    indices = range(cuda.device_count())
    return [Gpu(cuda.get_device_name(i), cuda.get_device_capability(i)) for i in indices]


def _torch_build() -> dict[str, Any]:
    """What torch was built for: `cuda` and `hip`, None or a version; without importing torch."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is a dependency"
    return run_path(str(Path(spec.origin).with_name("version.py")))


def _gpu_dtypes(capable_of_bf16: list[bool]) -> list[str]:
    if not capable_of_bf16:
        return []
    return ["bfloat16", "float16", "float32"] if all(capable_of_bf16) else ["float16", "float32"]
