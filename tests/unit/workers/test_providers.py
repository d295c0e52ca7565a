"""The switches that separate a norm or an activation from the quantized layer after it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.fp8 import FP8_MODELS, save_fp8
from tests.helpers.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.tiny_models import prompt_of
from workers.layers import activation
from workers.layers import linear as layers

LLAMA = "ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED"
NORM, GATE = f"{LLAMA}_RMSNORM_QUANT", f"{LLAMA}_SILU_MUL_QUANT"
DEEPSEEK_NORM = "ATOM_ENABLE_DS_INPUT_RMSNORM_QUANT_FUSION"
QWEN, DEEPSEEK = FP8_MODELS[0], FP8_MODELS[2]
TINY_LLAMA = replace(QWEN, name="llama", model_type="llama")


def calls(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a step calls the fused ops."""
    found: Counter[str] = Counter()

    def counted(name: str, function: object) -> object:
        def call(*args: object) -> object:
            found[name] += 1
            return function(*args)  # type: ignore[operator]

        return call

    monkeypatch.setattr(layers, "add_norm_linear", counted("norm", layers.add_norm_linear))
    monkeypatch.setitem(activation._FUSED, "silu", counted("gate", activation._FUSED["silu"]))
    worker = TinyWorker(directory)
    core = worker.core()
    core.add(0, prompt_of(8, seed=3))
    forced_logits(worker.worker, core, 0, [8])
    monkeypatch.undo()
    return found


def test_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(TINY_LLAMA, tmp_path)
    together = calls(tmp_path, monkeypatch)
    assert together["norm"] == 2 * together["gate"] > 0
    monkeypatch.setenv(NORM, "0")
    assert calls(tmp_path, monkeypatch) == {"gate": together["gate"]}
    monkeypatch.setenv(GATE, "0")
    assert calls(tmp_path, monkeypatch) == {"norm": together["norm"]}


def test_deepseek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(DEEPSEEK, tmp_path)
    together = calls(tmp_path, monkeypatch)
    assert together["norm"] > 0
    monkeypatch.setenv(DEEPSEEK_NORM, "0")
    assert calls(tmp_path, monkeypatch) == {"gate": together["gate"]}


def test_other_families_have_no_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(QWEN, tmp_path)
    together = calls(tmp_path, monkeypatch)
    for name in (NORM, GATE, DEEPSEEK_NORM):
        monkeypatch.setenv(name, "0")
    assert calls(tmp_path, monkeypatch) == together
