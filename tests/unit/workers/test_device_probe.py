"""The devices and dtypes that the probe finds."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from workers import device_probe


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
    monkeypatch.setattr(device_probe.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert device_probe.cpu_cores() == cores


def torch_with(capabilities: list[tuple[int, int]], cuda: str | None = "13.0") -> types.SimpleNamespace:
    return types.SimpleNamespace(
        version=types.SimpleNamespace(hip=None, cuda=cuda),
        cuda=types.SimpleNamespace(
            device_count=lambda: len(capabilities),
            get_device_capability=lambda index: capabilities[index],
            get_device_name=lambda index: f"GPU {index}",
        ),
    )


@pytest.mark.parametrize(
    ("torch", "dtypes", "problem"),
    [
        (torch_with([(9, 0), (9, 0)]), ["bfloat16", "float16", "float32"], ""),
        (torch_with([(9, 0), (7, 5)]), ["float16", "float32"], ""),
        (torch_with([]), [], "torch cannot use any"),
        (torch_with([], cuda=None), [], "the installed torch is a CPU build"),
    ],
)
def test_gpus_are_what_torch_says(
    monkeypatch: pytest.MonkeyPatch, torch: types.SimpleNamespace, dtypes: list[str], problem: str
) -> None:
    monkeypatch.setattr(device_probe, "_GPU_DEVICE_FILES", ("/dev/null",))
    monkeypatch.setitem(sys.modules, "torch", torch)
    host = device_probe.probe()
    assert (host.cuda, len(host.names)) == (torch.cuda.device_count(),) * 2
    assert problem in host.gpu_problem and bool(problem) == bool(host.gpu_problem)
    assert host.gpu_dtypes == dtypes
