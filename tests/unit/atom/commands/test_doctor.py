"""What `atom doctor` reads and concludes, and what it makes of libraries that hang or crash."""

import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atom.commands import doctor, host
from atom.commands.doctor_report import report_text
from atom.commands.host import Cache, Cpu, Host, Package
from atom.shared.messages.doctor import Devices, Gpu, Library, LibraryLaunch
from tests.helpers.checkpoints.fake_hub import FakeHub

GIB = 1 << 30
CPU = Cpu("A CPU", 8, ["AVX2"], 64 * GIB, 32 * GIB, None, None)
PACKAGES = [Package("torch", "2.11.0", ">=2.11", True), Package("triton", "", "", True)]
CACHE = Cache("/home/me/.cache/atom", 20 * GIB)
HOST = Host(CPU, "", [], PACKAGES, (1024, 4096), GIB, 8000, True, compiler="/usr/bin/c++ (13.2)", cache=CACHE)
DEVICES = Devices("", "2.11.0 (CPU)", [], "", ["bfloat16", "float32"], {"cpu": "every other op: torch"})

NVIDIA = """\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\t0-47\t0
GPU1\tNV18\t X \tSYS\t0-47\t0
GPU2\tSYS\tSYS\t X \t48-95\t1

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""
ROCM = """============================ ROCm System Management Interface ============================
================================ Link Type between two GPUs ================================
       GPU0         GPU1
GPU0   0            XGMI
GPU1   XGMI         0
================================== End of ROCm SMI Log ===================================
"""
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-1\t0\n"


@pytest.mark.parametrize(
    ("matrix", "links"),
    [
        (NVIDIA, ["NV18: 0-1", "SYS: 0-2, 1-2"]),
        (ROCM, ["XGMI between all GPUs"]),
        (ONE, []),
        ("", []),
    ],
)
def test_links(matrix: str, links: list[str]) -> None:
    assert host.parse_links(matrix) == links


def test_cpu_within_a_control_group(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "group"
    proc.mkdir()
    group.mkdir()
    (proc / "cpuinfo").write_text("processor : 0\nmodel name : Fast 9\nflags : fpu avx2 avx512f amx_bf16\n")
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 800 kB\n")
    free = host.find_cpu(proc, group)
    assert (free.name, free.instructions) == ("Fast 9", ["AVX2", "AVX-512", "AMX BF16"])
    assert (free.total_bytes, free.available_bytes, free.limit_bytes) == (1_024_000, 819_200, None)
    (group / "memory.max").write_text("500000\n")
    (group / "memory.current").write_text("100000\n")
    (group / "cpu.max").write_text("150000 100000\n")
    bound = host.find_cpu(proc, group)
    assert (bound.available_bytes, bound.limit_bytes, bound.cpu_quota) == (400_000, 500_000, 1.5)
    assert bound.cores == 1


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.11.0+cu130", True), ("2.11", True), ("3.0.dev1", True), ("2.9.1", False), ("", False)],
)
def test_versions_against_the_lower_bound(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if not version:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=2.11", "amd-aiter; extra == 'rocm'"])
    assert host.find_package("torch") == Package("torch", version, ">=2.11", fits)
    assert host.find_package("triton") == Package("triton", version, "", True)


def library(module: str, seconds: float = 60.0) -> Library:
    launch = LibraryLaunch(module, f"no-such-{module}")
    result = doctor._start("atom.shared.utils.optional_library", launch, Library, time.monotonic() + seconds)
    return result()


def test_libraries_that_do_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "good_one": "print('hello from the import')\n__version__ = '1.2'",
        "raising_one": "raise OSError('libamdhip64.so: no such\\nfile')",
        "exiting_one": "raise SystemExit(3)",
        "crashing_one": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "needing_one": "import a_module_that_is_missing",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert library("good_one") == Library("1.2", "")
    assert library("raising_one").error == "OSError: libamdhip64.so: no such file"
    assert library("exiting_one").error == "SystemExit: 3"
    assert library("crashing_one").error == "the import crashed: killed by SIGSEGV"
    assert library("needing_one").error.startswith("ModuleNotFoundError: No module named 'a_module")
    assert library("absent_one").error == "not installed"


def test_a_hanging_import_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging_one.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begun = time.monotonic()
    assert library("hanging_one", 1.0).error == "the import did not end in time"
    assert time.monotonic() - begun < 20


def report(found: Host = HOST, devices: Devices = DEVICES) -> doctor.Report:
    problems = list(doctor._problems(found, devices))
    warnings = list(doctor._warnings(found, devices))
    return doctor.Report(not problems, problems, warnings, found, devices, {"AITER": Library("", "no")}, None)


def changed(value: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(value, **fields)


def test_a_good_host_has_neither_problems_nor_warnings() -> None:
    good = report()
    assert good.can_serve and not good.warnings
    text = report_text(good)
    assert "a model can be served on the CPU" in text
    assert (
        "compiler   /usr/bin/c++ (13.2)" in text and "cache      /home/me/.cache/atom, 20.0 GiB free" in text
    )


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    found = host.find_cache(tmp_path / "not" / "yet")
    assert not found.problem and found.free_bytes > 0 and list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    bad = host.find_cache(tmp_path / "file")
    assert bad.problem == f"cannot write to {tmp_path / 'file'}: Not a directory"
    (line,) = doctor._unusable_directories(bad)
    assert line == f"{bad.problem}: set ATOM_CACHE_DIR to a writable directory"


def test_the_compiler_is_the_one_that_compiles_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert host._compiler() == ""
    monkeypatch.setenv("CXX", "sh -c")
    assert host._compiler().startswith("/") and " -c" in host._compiler()


@pytest.mark.parametrize(
    ("found", "devices", "text"),
    [
        (HOST, changed(DEVICES, error="ImportError: libcudart"), "torch cannot be used (ImportError"),
        (HOST, changed(DEVICES, ops={"cpu": "none: ValueError: x"}), "no ops run on cpu (ValueError: x)"),
        (changed(HOST, open_files=(64, 128)), DEVICES, "only 128 files may be open"),
        (
            changed(HOST, packages=[Package("torch", "2.9", ">=2.11", False)]),
            DEVICES,
            "torch 2.9 is too old: pip install 'torch>=2.11'",
        ),
        (
            changed(HOST, packages=[Package("torch", "", ">=2.11", False)]),
            DEVICES,
            "torch is missing: pip install",
        ),
    ],
)
def test_problems_say_what_to_do(found: Host, devices: Devices, text: str) -> None:
    bad = report(found, devices)
    assert not bad.can_serve and len(bad.problems) == 1 and text in bad.problems[0]
    assert "no model can be served" in report_text(bad)


@pytest.mark.parametrize(
    ("found", "devices", "text"),
    [
        (HOST, changed(DEVICES, gpu_problem="a CPU build"), "only the CPU is used: a CPU build"),
        (changed(HOST, driver="NVIDIA 580"), DEVICES, "but torch finds no GPU"),
        (changed(HOST, port_is_free=False), DEVICES, "port 8000 is in use"),
        (changed(HOST, cpu=changed(CPU, available_bytes=5 << 20)), DEVICES, "only 5 MiB of memory"),
        (changed(HOST, compiler=""), DEVICES, "there is no C++ compiler"),
        (changed(HOST, cache=changed(CACHE, free_bytes=9 << 20)), DEVICES, "only 9 MiB are free in /home"),
        (HOST, changed(DEVICES, dtypes=["float32"]), "no 16-bit arithmetic"),
        (
            changed(HOST, shared_memory_bytes=64 << 20),
            changed(DEVICES, gpus=[Gpu("H200", GIB, GIB, "9.0")] * 2),
            "--shm-size",
        ),
    ],
)
def test_warnings_do_not_forbid_serving(found: Host, devices: Devices, text: str) -> None:
    warned = report(found, devices)
    assert warned.can_serve and len(warned.warnings) == 1 and text in warned.warnings[0]


def test_eight_gpus_are_one_screen() -> None:
    gpus = [Gpu("NVIDIA H200", 140 * GIB, 139 * GIB, "9.0")] * 8
    ops = {name: "; ".join(f"op_{n}: triton > torch" for n in range(20)) for name in ("cpu", "NVIDIA H200")}
    found = changed(HOST, driver="NVIDIA 580.1", links=["NV18 between all GPUs"])
    lines = report_text(report(found, changed(DEVICES, gpus=gpus, ops=ops))).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 110
    assert "  GPUs       8 x NVIDIA H200 (9.0), 140.0 GiB each, at least 139.0 GiB free" in lines


def test_a_child_that_prints_no_result_is_an_error() -> None:
    child = subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    found = doctor._result(child, Devices, time.monotonic() + 20)
    assert found.error == "the import crashed: ended with exit status 0"


def test_the_hub_is_tried_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub("owner/name", {}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert doctor.reach_hub().startswith(f"{hub.url} responds")
    assert doctor.reach_hub().startswith(f"{hub.url} cannot be reached: ")
