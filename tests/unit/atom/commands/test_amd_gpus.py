"""`atom doctor` on an AMD host: a model of amdsmi with the signatures of its published wheel."""

import enum
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from atom.commands import amd_gpus, doctor, host
from atom.commands.doctor_report import report_text
from atom.shared.messages.doctor import AmdGpu, AmdGpus, AmdLaunch, Gpu, Library
from tests.helpers.parallel.signatures import parsed, published
from tests.unit.atom.commands.test_doctor import DEVICES, GIB, HOST, changed

MI300X = AmdGpu("AMD Instinct MI300X", "gfx942", 192 * GIB, 190 * GIB)


class LinkType(enum.IntEnum):
    """Numbered as in the wheel."""

    AMDSMI_LINK_TYPE_INTERNAL = 0
    AMDSMI_LINK_TYPE_PCIE = 1
    AMDSMI_LINK_TYPE_XGMI = 2


def installed(monkeypatch: pytest.MonkeyPatch, gpus: int, **replaced: Callable[..., Any]) -> list[str]:
    """`import amdsmi` finds a host with these GPUs; returns the names of the functions that are called."""
    called: list[str] = []
    semantics: dict[str, Callable[..., Any]] = {
        "amdsmi_init": lambda: None,
        "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: list(range(gpus)),
        "amdsmi_get_gpu_driver_info": lambda processor_handle: {
            "driver_name": "amdgpu", "driver_version": "6.14.14", "driver_date": "N/A",
        },
        "amdsmi_get_rocm_version": lambda: (True, "7.0.2"),
        "amdsmi_get_gpu_asic_info": lambda processor_handle: {
            "market_name": "AMD Instinct MI300X", "target_graphics_version": "gfx942",
        },
        "amdsmi_get_gpu_vram_usage": lambda processor_handle: {"vram_total": 192 << 10, "vram_used": 2 << 10},
        "amdsmi_topo_get_link_type": lambda processor_handle_src, processor_handle_dst: {
            "hops": 1, "type": 2 if (processor_handle_src, processor_handle_dst) != (0, 2) else 1,
        },
    } | replaced  # fmt: skip
    module = ModuleType("amdsmi")
    module.__spec__ = ModuleSpec("amdsmi", None)
    signatures = published()

    def bound(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = parsed(signatures[f"amdsmi.{name}"])

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(**signature.bind(*args, **kwargs).arguments)

        return call

    for name, function in semantics.items():
        setattr(module, name, bound(name, function))
    module.AmdSmiLinkType = LinkType  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    return called


def test_all_gpus_of_the_driver_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    called = installed(monkeypatch, 3)
    found = amd_gpus.describe()
    assert found == AmdGpus("", [MI300X] * 3, "amdgpu 6.14.14", "7.0.2", ["XGMI: 0-1, 1-2", "PCIE: 0-2"])
    assert (called[0], called[-1]) == ("amdsmi_init", "amdsmi_shut_down")
    assert {f"amdsmi.{name}" for name in called} == {
        name for name, text in published().items() if name.startswith("amdsmi.") and text != "constant"
    }


def test_a_driver_that_does_not_respond_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("AMDSMI_STATUS_NOT_INIT")

    installed(monkeypatch, 1, amdsmi_get_processor_handles=fail)
    assert amd_gpus.describe() == AmdGpus(error="RuntimeError: AMDSMI_STATUS_NOT_INIT")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert amd_gpus.describe().error == "amdsmi is not installed"


def test_the_report_shows_the_gpus_that_a_variable_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")
    visible = host.find_host(8000).visible
    assert visible["HIP_VISIBLE_DEVICES"] == "2"
    amd = AmdGpus("", [MI300X] * 8, "amdgpu 6.14.14", "7.0.2", ["XGMI between all GPUs"])
    devices = changed(DEVICES, gpus=[Gpu(MI300X.name, 192 * GIB, 190 * GIB, "gfx942")])
    libraries = {"AITER": Library("0.1.7", "OSError: libhsa.so"), "MORI": Library("", "not installed")}
    warnings = list(doctor._unusable_libraries(devices, libraries))
    report = doctor.Report(True, [], warnings, changed(HOST, visible=visible), devices, libraries, None, amd)
    lines = report_text(report).splitlines()
    assert "8 x AMD Instinct MI300X (gfx942), 192.0 GiB each on this host; ROCm 7.0.2" in " ".join(lines)
    assert any(line.startswith("  visible    ") and "HIP_VISIBLE_DEVICES=2" in line for line in lines)
    assert "  links      XGMI between all GPUs" in lines
    (warning,) = warnings
    assert warning.startswith("AITER is not used: amd-aiter 0.1.7 cannot be imported (OSError: libhsa.so)")
    assert not list(doctor._unusable_libraries(DEVICES, libraries)), "without AMD's GPUs nothing uses them"


def test_amds_library_is_asked_in_a_process_of_its_own() -> None:
    found = doctor._start("atom.commands.amd_gpus", AmdLaunch(), AmdGpus, time.monotonic() + 60)()
    assert found.error or found.gpus, "it is not installed, finds no driver, or finds GPUs"
