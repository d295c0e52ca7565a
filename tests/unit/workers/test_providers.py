"""The switches that separate a fused op into its parts, or choose ATOM's attention."""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atom_ops import backend
from atom_ops.attention_backend import ATTENTION_BACKENDS
from atom_ops.op import REGISTRY, Provider
from tests.helpers.checkpoints.fp8 import FP8_MODELS, save_fp8
from tests.helpers.checkpoints.tiny_models import Tiny, prompt_of, save_tiny, tiny
from tests.helpers.engine.heads_first import HeadsFirst
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from workers import providers
from workers.checkpoint.families import architectures
from workers.layers.mla.latent_decoder import LatentDecoderLM

LLAMA = "ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED"
NORM = f"{LLAMA}_RMSNORM_QUANT"
GATE = f"{LLAMA}_SILU_MUL_QUANT"
DEEPSEEK_NORM = "ATOM_ENABLE_DS_INPUT_RMSNORM_QUANT_FUSION"
LATENT_NORMS = "ATOM_ENABLE_DS_QKNORM_FUSION"
QUERIES = "ATOM_ENABLE_DS_QKNORM_QUANT_FUSION"
ALL = (NORM, GATE, DEEPSEEK_NORM, LATENT_NORMS, QUERIES)
QWEN, DEEPSEEK = FP8_MODELS[0], FP8_MODELS[2]
TINY_LLAMA = replace(QWEN, name="llama", model_type="llama")
FUSED = {
    "add_norm_linear": "norm",
    "silu_and_mul_linear": "gate",
    "norm_and_write_latents": "latents",
    "latent_queries": "queries",
}
"""Ops that a switch separates -> the name of their calls here."""


@pytest.fixture(autouse=True)
def resolved_again() -> Iterator[None]:
    yield
    backend.resolve(torch.device("cpu"))


def calls(directory: Path, monkeypatch: pytest.MonkeyPatch, *off: str) -> Counter[str]:
    """How often a step runs a fused kernel, with these variables off."""
    found: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            found[name] += 1
            return function(*args)

        return call

    with monkeypatch.context() as patched:
        for variable in off:
            patched.setenv(variable, "0")
        patched.setitem(backend._DEFAULT_ORDER, "cpu", ("fused", *backend._DEFAULT_ORDER["cpu"]))
        for name, label in FUSED.items():
            op = REGISTRY[name]
            fused = Provider("fused", counted(label, op.reference), "a CPU", lambda device: True, None, None)
            patched.setitem(op.providers, "fused", fused)
        worker = TinyWorker(directory)
        core = worker.core()
        core.add(0, prompt_of(8, seed=3))
        forced_logits(worker.worker, core, 0, [8])
    return found


def test_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(TINY_LLAMA, tmp_path)
    together = calls(tmp_path, monkeypatch)
    assert together["norm"] == 2 * together["gate"] > 0
    assert calls(tmp_path, monkeypatch, NORM) == {"gate": together["gate"]}
    assert calls(tmp_path, monkeypatch, GATE) == {"norm": together["norm"]}
    assert calls(tmp_path, monkeypatch, DEEPSEEK_NORM, LATENT_NORMS, QUERIES) == together


def test_a_plain_llama_has_no_quantization_to_separate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(Tiny("llama", "llama", 4, {}), tmp_path)
    together = calls(tmp_path, monkeypatch)
    assert together["norm"] == 2 * together["gate"] > 0
    assert calls(tmp_path, monkeypatch, NORM) == together
    assert calls(tmp_path, monkeypatch, GATE) == {"norm": together["norm"]}


def test_deepseek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(DEEPSEEK, tmp_path)
    together = calls(tmp_path, monkeypatch)
    assert set(together) == set(FUSED.values())
    without_norm = {name: count for name, count in together.items() if name != "norm"}
    assert calls(tmp_path, monkeypatch, DEEPSEEK_NORM) == without_norm
    without_queries = {name: count for name, count in together.items() if name != "queries"}
    assert calls(tmp_path, monkeypatch, QUERIES) == without_queries
    without_latents = {name: together[name] for name in ("norm", "gate")}
    assert calls(tmp_path, monkeypatch, LATENT_NORMS) == without_latents
    assert calls(tmp_path, monkeypatch, NORM, GATE) == together


def test_other_families_have_no_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(QWEN, tmp_path)
    assert calls(tmp_path, monkeypatch, *ALL) == calls(tmp_path, monkeypatch)


def test_the_switches_of_deepseek_are_those_of_all_families_with_its_decoder() -> None:
    found = []
    for family, (name, *_) in architectures().items():
        model = importlib.import_module(f"workers.models.{family}").ARCHITECTURES[name]
        if issubclass(model, LatentDecoderLM):
            found.append(family)
    assert sorted(found) == sorted(providers._DEEPSEEK)


def test_only_composed_ops_are_separated() -> None:
    names = {op for fusion in providers._FUSIONS for op in fusion.ops}
    assert names == set(FUSED) and all(REGISTRY[name].composed for name in names)


@pytest.mark.parametrize(
    "switch", [None, "ATOM_ENABLE_QK_NORM_ROPE_CACHE_QUANT_FUSION", "ATOM_ROPE_FUSED_QKNORM"]
)
@pytest.mark.parametrize("name", ["qwen3-moe", "llama-gqa"])
def test_head_norms_of_qwen3_moe_want_our_attention(
    name: str, switch: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "aiter", HeadsFirst())
    monkeypatch.setitem(backend._DEFAULT_ORDER, "cpu", ("aiter", *backend._DEFAULT_ORDER["cpu"]))
    if switch is not None:
        monkeypatch.setenv(switch, "1")
    save_tiny(tiny(name), tmp_path)
    group = TinyWorker(tmp_path).worker._model.kv_groups[0]
    ours = name == "qwen3-moe" and switch is not None
    assert group.backend.name == ("interleaved_kv" if ours else HeadsFirst().name)
