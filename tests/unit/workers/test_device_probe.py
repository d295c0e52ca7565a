"""What the host can compute with."""

import sys
import types
from pathlib import Path

import pytest

from workers import device_probe


@pytest.mark.parametrize(
    ("flags", "dtypes"),
    [
        ({"avx2", "avx512f"}, []),
        ({"avx512_bf16"}, ["bfloat16"]),
        ({"amx_bf16", "avx512_fp16"}, ["bfloat16", "float16"]),
        ({"asimdhp", "bf16"}, ["bfloat16", "float16"]),
    ],
)
def test_cpu_arithmetic(flags: set[str], dtypes: list[str]) -> None:
    assert device_probe.cpu_dtypes_of(flags) == dtypes


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
