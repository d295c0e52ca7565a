"""What vLLM's entry points register, without vLLM: its modules that they import are stand-ins."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from atom.plugin.families import VLLM
from atom.plugin.vllm import registration
from workers.checkpoint.families import architectures

DEADLINE_S = 60


class Host:
    """Stand-ins of vLLM's modules, and what was registered with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str):
        self.models: dict[str, str] = {}
        self.backends: list[tuple[str, str]] = []
        self.warnings: list[str] = []
        self.platforms: dict[str, Any] = {
            "cuda": lambda: None,
            "cpu": lambda: "vllm.platforms.cpu.CpuPlatform",
        }
        enum = type("AttentionBackendEnum", (), {"CUSTOM": "CUSTOM"})
        modules: dict[str, dict[str, Any]] = {
            "vllm": {"ModelRegistry": self},
            "vllm.logger": {"init_logger": lambda name: self},
            "vllm.version": {"__version__": version},
            "vllm.platforms": {"builtin_platform_plugins": self.platforms},
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": enum,
                "register_backend": lambda *given: self.backends.append(given),
            },
        }
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)

    def register_model(self, name: str, target: str) -> None:
        self.models[name] = target

    def info(self, *line: object) -> None:
        """The list of models for the log."""

    def warning(self, *line: object) -> None:
        self.warnings.append(str(line[-1]))


def test_both_entry_points_register_and_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, "0.32.0")
    for _ in range(2):
        assert registration.register_platform() == registration.PLATFORM
        registration.register_models()
    assert host.models["LlamaForCausalLM"] == registration.MODEL
    assert set(host.models) == set(VLLM.replaced(own_attention=True))
    assert set(host.backends) == {("CUSTOM", registration.ATTENTION_BACKEND)}


def test_vllm_s_own_entries_are_kept_for_larger_models(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, "0.32.0")
    monkeypatch.setattr(registration, "REPLACED", {})
    host.models["Gemma3ForCausalLM"] = "vLLM's own"
    for _ in range(2):
        registration.register_models()
    assert host.models["Gemma3ForCausalLM"] == registration.MODEL
    assert registration.REPLACED["Gemma3ForCausalLM"] == "vLLM's own"
    assert registration.REPLACED["MinistralForCausalLM"] is None


def test_the_plugin_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, "0.32.0")
    monkeypatch.setenv("ATOM_DISABLE_VLLM_PLUGIN", "1")
    registration.register_models()
    assert registration.register_platform() is None
    assert host.models == {} and host.backends == []


def test_its_attention_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, "0.32.0")
    monkeypatch.setenv("ATOM_DISABLE_VLLM_PLUGIN_ATTENTION", "1")
    registration.register_models()
    assert host.backends == []
    assert "LlamaForCausalLM" in host.models and "DeepseekV3ForCausalLM" not in host.models


def test_an_unknown_version_of_vllm_runs_without_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, "0.99.0")
    registration.register_models()
    assert registration.register_platform() is None
    assert host.models == {} and "vLLM 0.99.0 runs without it" in host.warnings[0]


@pytest.mark.parametrize("names", [(), ("cuda", "cpu")])
def test_without_one_platform_vllm_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    host = Host(monkeypatch, "0.32.0")
    for name in host.platforms:
        host.platforms[name] = (lambda: "a platform") if name in names else (lambda: None)
    assert registration.register_platform() is None


def test_families_that_are_left_to_vllm() -> None:
    ours = {name for names in architectures().values() for name in names}
    own = set(VLLM.replaced(own_attention=True))
    assert own < ours
    assert ours - own >= {"Qwen3NextForCausalLM", "DeepseekV4ForCausalLM", "Gemma3ForConditionalGeneration"}
    assert own - set(VLLM.replaced(own_attention=False)) == {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Mistral4ForCausalLM",
    }


def test_every_path_that_vllm_is_given_exists() -> None:
    for path in (registration.PLATFORM, registration.MODEL, registration.ATTENTION_BACKEND):
        module, _, name = path.replace(":", ".").rpartition(".")
        source = Path(*module.split(".")).with_suffix(".py")
        assert f"class {name}(" in (Path(__file__).parents[5] / source).read_text()


def test_registration_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, atom.plugin.vllm.registration; print({'vllm', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.strip() == "set()", done.stderr
    assert import_module("atom.plugin.vllm.registration") is registration
