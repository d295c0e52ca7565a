"""The environment's switches choose what AITER runs, and do not change the ids."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atom_ops import backend
from tests.aiter_contract.package import install
from tests.helpers.checkpoints.four_bits import FOUR_BIT_FORMATS
from tests.helpers.checkpoints.fp8 import FP8_MODELS, save_fp8
from tests.helpers.checkpoints.quantized_formats import save_quantized
from tests.helpers.checkpoints.tiny_models import Tiny, prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import TinyWorker
from tests.helpers.kernels.op_cases import CPU
from tests.helpers.parallel.signatures import published

PROMPTS = [prompt_of(length, length) for length in (5, 21)]
HEADS = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 256, "num_hidden_layers": 2}  # fmt: skip
LLAMA = Tiny("llama", "llama", 4, HEADS)
QWEN3_MOE = Tiny("qwen3-moe", "qwen3_moe", 2, tiny("qwen3-moe").config | {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "mlp_only_layers": [0],
})  # fmt: skip
_NORM = "aiter.ops.triton.fused_fp8_quant.fused_rms_fp8_group_quant"
_GATE = "aiter.ops.triton.activation.act_mul_and_fp8_group_quant"
_WRITERS = (
    "aiter.reshape_and_cache_flash",
    "aiter.ops.triton.fused_kv_cache.fused_qk_rope_reshape_and_cache",
)


@pytest.fixture(autouse=True)
def ops_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    backend.resolve(CPU)


def run(directory: Path, monkeypatch: pytest.MonkeyPatch, gpu: str) -> tuple[list[list[int]], Counter[str]]:
    """The ids, and how often each function of AITER is called."""
    calls = install(monkeypatch, published(), architecture=gpu)
    worker = TinyWorker(directory)
    return generate(worker.core(), worker.execute, PROMPTS, 12, 16, 3), calls


def test_triton_gemm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (format,) = (each for each in FOUR_BIT_FORMATS if each.name == "quark mxfp4")
    save_quantized(LLAMA, format, tmp_path)
    ids, calls = run(tmp_path, monkeypatch, "gfx950")
    triton = "aiter.ops.triton.gemm_afp4wfp4.gemm_afp4wfp4"
    assert calls["aiter.gemm_a4w4"] > 0 == calls[triton]
    monkeypatch.setenv("ATOM_USE_TRITON_GEMM", "1")
    found, switched = run(tmp_path, monkeypatch, "gfx950")
    assert found == ids and switched["aiter.gemm_a4w4"] == 0
    assert switched[triton] == calls["aiter.gemm_a4w4"]


def test_norms_and_activations_of_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(LLAMA, tmp_path)
    ids, calls = run(tmp_path, monkeypatch, "gfx942")
    assert calls[_NORM] == 2 * calls[_GATE] > 0
    for switch, off, on in (("RMSNORM_QUANT", _NORM, _GATE), ("SILU_MUL_QUANT", _GATE, _NORM)):
        with monkeypatch.context() as single:
            single.setenv(f"ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_{switch}", "0")
            found, switched = run(tmp_path, single, "gfx942")
        assert found == ids and switched[off] == 0 and switched[on] == calls[on]


def test_norms_of_deepseek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepseek = replace(FP8_MODELS[2], config=FP8_MODELS[2].config | {"num_hidden_layers": 2})
    save_fp8(deepseek, tmp_path)
    ids, calls = run(tmp_path, monkeypatch, "gfx942")
    with monkeypatch.context() as single:
        single.setenv("ATOM_ENABLE_DS_INPUT_RMSNORM_QUANT_FUSION", "0")
        found, queries = run(tmp_path, single, "gfx942")
    monkeypatch.setenv("ATOM_ENABLE_DS_QKNORM_QUANT_FUSION", "0")
    found_too, switched = run(tmp_path, monkeypatch, "gfx942")
    assert found == found_too == ids and queries[_NORM] > 0 < switched[_NORM]
    assert queries[_NORM] + switched[_NORM] == calls[_NORM], "one switch has no effect on the other"
    monkeypatch.setenv("ATOM_ENABLE_DS_INPUT_RMSNORM_QUANT_FUSION", "0")
    found, switched = run(tmp_path, monkeypatch, "gfx942")
    assert found == ids and switched[_NORM] == 0


@pytest.mark.parametrize("switch", ["ATOM_ENABLE_QK_NORM_ROPE_CACHE_QUANT_FUSION", "ATOM_ROPE_FUSED_QKNORM"])
def test_head_norms_of_qwen3_moe(switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(QWEN3_MOE, tmp_path)
    ids, calls = run(tmp_path, monkeypatch, "gfx942")
    assert sum(calls[name] for name in _WRITERS) > 0
    monkeypatch.setenv(switch, "1")
    found, switched = run(tmp_path, monkeypatch, "gfx942")
    assert found == ids and not any(switched[name] for name in _WRITERS)
    assert switched["aiter.fused_moe.fused_moe"] == calls["aiter.fused_moe.fused_moe"] > 0
