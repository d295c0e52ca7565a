"""Text models within larger ones are vLLM's own, without vLLM: its modules are stand-ins."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from atom.plugin.vllm import registration

MODULE = "atom.plugin.vllm.inner_model"


class Own:
    """vLLM's model."""

    def __init__(self, *, vllm_config: Any, prefix: str):
        self.given = vllm_config, prefix


class Utils(ModuleType):
    """vLLM's model_loader.utils."""

    def __init__(self) -> None:
        super().__init__("vllm.model_executor.model_loader.utils")
        self.configured: list[tuple[Any, type]] = []

    @staticmethod
    def get_model_architecture(model_config: Any) -> tuple[type, str]:
        return object, model_config.architecture

    def configure_quant_config(self, quant_config: Any, model_class: type) -> None:
        self.configured.append((quant_config, model_class))


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Utils:
    found = Utils()
    parents = ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader")
    for module in (*map(ModuleType, parents), found):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, MODULE, import_module(MODULE))
    entry = SimpleNamespace(load_model_cls=lambda: Own)
    monkeypatch.setattr(registration, "REPLACED", {"Gemma3ForCausalLM": entry, "MinistralForCausalLM": None})
    monkeypatch.setattr(sys.modules[MODULE], "REPLACED", registration.REPLACED)
    return found


def config(architecture: str, quantization: str | None = None) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(architecture=architecture), quant_config=quantization)


def test_it_is_vllm_s_own_model(utils: Utils) -> None:
    plain = config("Gemma3ForCausalLM")
    found: Any = sys.modules[MODULE].inner_model(plain, "language_model")
    assert isinstance(found, Own) and found.given == (plain, "language_model")
    assert utils.configured == []


def test_a_quantized_one_knows_its_own_modules(utils: Utils) -> None:
    sys.modules[MODULE].inner_model(config("Gemma3ForCausalLM", "fp8"), "language_model")
    assert utils.configured == [("fp8", Own)]


def test_one_that_vllm_lacks_is_refused(utils: Utils) -> None:
    with pytest.raises(ValueError, match="no MinistralForCausalLM of its own to be the language_model"):
        sys.modules[MODULE].inner_model(config("MinistralForCausalLM"), "language_model")
