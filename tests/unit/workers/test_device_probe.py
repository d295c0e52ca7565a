"""The devices and dtypes that the probe finds."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from workers import device_probe
from workers.nvidia_driver import Gpu


@pytest.mark.parametrize(
    ("flags", "limit", "dtypes"),
    [
        ({"avx2", "avx512f"}, "", []),
        ({"avx512_bf16"}, "", ["bfloat16"]),
        ({"amx_bf16", "avx512_fp16"}, "", ["bfloat16", "float16"]),
        ({"asimdhp", "bf16"}, "", ["bfloat16", "float16"]),
        ({"amx_bf16", "avx512_fp16"}, "ALL", ["bfloat16", "float16"]),
        ({"amx_bf16", "avx512_fp16"}, "AVX512_CORE_BF16", ["bfloat16"]),
        ({"amx_bf16", "avx512_fp16"}, "avx512_core", []),
        ({"amx_bf16", "avx512_fp16"}, "AVX2", []),
        ({"avx2"}, "AVX512_CORE_BF16", []),
    ],
)
def test_cpu_arithmetic(flags: set[str], limit: str, dtypes: list[str]) -> None:
    assert device_probe.cpu_dtypes_of(flags, limit) == dtypes


@pytest.mark.parametrize("limit", [None, "AVX2", "AVX512_CORE", "AVX512_CORE_BF16"])
def test_the_probe_finds_only_dtypes_that_onednn_supports(limit: str | None) -> None:
    """In a new process: oneDNN reads its limit once."""
    environment = os.environ | ({"ONEDNN_MAX_CPU_ISA": limit} if limit else {})
    code = (
        "import torch; from workers import device_probe; "
        "print(torch.ops.mkldnn._is_mkldnn_bf16_supported(), *device_probe.probe().cpu_dtypes)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    supported, *dtypes = ran.stdout.split()
    assert dtypes[-1] == "float32"
    assert "bfloat16" not in dtypes or supported == "True"


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_a_containers_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(device_probe, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert device_probe.cpu_cores() == cores


def build(monkeypatch: pytest.MonkeyPatch, cuda: str | None, hip: str | None = None) -> None:
    monkeypatch.setattr(device_probe, "_GPU_DEVICE_FILES", ("/dev/null",))
    monkeypatch.setattr(device_probe, "_torch_build", lambda: {"cuda": cuda, "hip": hip})


def use_torch(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A torch that can use so many GPUs."""
    cuda = types.SimpleNamespace(
        device_count=lambda: count,
        get_device_name=lambda index: f"GPU {index}",
        get_device_capability=lambda index: (9, 4),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize(
    ("capabilities", "dtypes", "problem"),
    [
        ([(9, 0), (9, 0)], ["bfloat16", "float16", "float32"], ""),
        ([(9, 0), (7, 5)], ["float16", "float32"], ""),
        ([], [], "torch cannot use any"),
    ],
)
def test_nvidias_gpus_are_what_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], dtypes: list[str], problem: str
) -> None:
    build(monkeypatch, "13.0")
    gpus = [Gpu(f"GPU {index}", capability) for index, capability in enumerate(capabilities)]
    monkeypatch.setattr(device_probe, "nvidia_gpus", lambda cuda: gpus)
    host = device_probe.probe()
    assert host.names == [gpu.name for gpu in gpus] and host.cuda == len(gpus) and not host.rocm
    assert problem in host.gpu_problem and bool(problem) == bool(host.gpu_problem)
    assert host.gpu_dtypes == dtypes


@pytest.mark.parametrize("count", [0, 2])
def test_torch_has_the_last_word_where_the_driver_fails(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    def fail(cuda: str) -> list[Gpu]:
        raise OSError("the driver supports CUDA 12.4, and the installed torch needs 13.0")

    build(monkeypatch, "13.0")
    use_torch(monkeypatch, count)
    monkeypatch.setattr(device_probe, "nvidia_gpus", fail)
    host = device_probe.probe()
    assert host.cuda == count
    assert ("torch cannot use any: the driver supports CUDA 12.4" in host.gpu_problem) == (not count)


def test_rocms_gpus_are_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, None, "7.0")
    use_torch(monkeypatch, 2)
    host = device_probe.probe()
    assert host.rocm and host.names == ["GPU 0", "GPU 1"] and host.gpu_dtypes[0] == "bfloat16"


def test_a_cpu_build_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, None)
    assert "the installed torch is a CPU build" in device_probe.probe().gpu_problem


def test_torchs_build_is_known_without_torch() -> None:
    import torch

    build = device_probe._torch_build()
    assert (build["cuda"], build["hip"]) == (torch.version.cuda, torch.version.hip)
