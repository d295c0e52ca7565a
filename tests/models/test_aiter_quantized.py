"""Whole tiny models with quantized weights on AITER's model: ids equal those of torch with equal rounding."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from atom_ops import backend
from atom_ops.op import REGISTRY
from tests.aiter_contract.package import install
from tests.helpers.checkpoints.four_bits import FOUR_BIT_FORMATS
from tests.helpers.checkpoints.fp8 import FP8_MODELS
from tests.helpers.checkpoints.mxfp4 import save_mxfp4
from tests.helpers.checkpoints.quantized_formats import FORMATS, save_quantized
from tests.helpers.checkpoints.tiny_models import Tiny, prompt_of
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import TinyWorker
from tests.helpers.kernels.op_cases import CPU
from tests.helpers.kernels.rounded import rounded_linear
from tests.helpers.parallel.signatures import in_development, published
from tests.helpers.parallel.thread_ranks import RankedWorkers

_HEADS = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
          "intermediate_size": 512, "num_hidden_layers": 2}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True,
            "mlp_only_layers": [0]}  # fmt: skip
MODELS = {
    "qwen3": Tiny("qwen3", "qwen3", 1, _HEADS),
    "llama": Tiny("llama", "llama", 4, _HEADS | {"attention_bias": True}),
    "qwen3-moe": Tiny("qwen3-moe", "qwen3_moe", 3, _HEADS | _EXPERTS),
    "deepseek-v3": replace(
        FP8_MODELS[2], config=FP8_MODELS[2].config | {"num_hidden_layers": 2, "n_routed_experts": 8}
    ),
}
PROMPTS = [prompt_of(length, length) for length in (5, 37, 20)]


@dataclass(frozen=True)
class Row:
    """One model in one format, and what AITER runs of it."""

    model: str
    format: str
    gpu: str
    calls: frozenset[str]
    release: str = "published"
    ranks: int = 1


_ROUTING = "aiter.biased_grouped_topk"
_SHUFFLE, _EXPERTS_CALL = "aiter.ops.shuffle.shuffle_weight", "aiter.fused_moe.fused_moe"
_BLOCKS = {"aiter.gemm_a8w8_blockscale_bpreshuffle", "aiter.ops.quant.per_group_quant_hip", _SHUFFLE}
_TOKENS = {"aiter.gemm_a8w8_bpreshuffle", "aiter.ops.quant.per_token_quant_hip", _SHUFFLE}
_STATIC = {"aiter.gemm_a8w8_bpreshuffle", "aiter.ops.quant.per_tensor_quant_hip", _SHUFFLE}
_INT8 = {"aiter.gemm_a8w8", "aiter.ops.quant.per_token_quant_hip"}
_FOUR_BITS = {"aiter.gemm_a4w4", "aiter.ops.quant.per_1x32_f4_quant_hip", _SHUFFLE}
ALWAYS = [
    Row("qwen3-moe", "fp8, blocks", "gfx942", frozenset(_BLOCKS | {_EXPERTS_CALL})),
    Row("llama", "fbgemm_fp8", "gfx942", frozenset(_TOKENS)),
    Row("qwen3-moe", "quark mxfp4", "gfx950", frozenset(_FOUR_BITS | {_EXPERTS_CALL}), "in development"),
    Row("gpt-oss", "", "gfx950", frozenset({_EXPERTS_CALL, "aiter.ops.shuffle.shuffle_weight_a16w4"})),
]
SOMETIMES = [
    Row("deepseek-v3", "fp8, blocks", "gfx942", frozenset(_BLOCKS | {_EXPERTS_CALL, _ROUTING})),
    Row("deepseek-v3", "quark, channel", "gfx950", frozenset(_TOKENS | {_EXPERTS_CALL, _ROUTING})),
    Row("qwen3-moe", "fp8, blocks", "gfx942", frozenset(_BLOCKS | {_EXPERTS_CALL}), ranks=2),
    Row("qwen3", "quark, channel", "gfx950", frozenset(_TOKENS), ranks=2),
    Row("qwen3-moe", "quark mxfp4", "gfx950", frozenset({_EXPERTS_CALL}), ranks=2),
    Row("llama", "fp8, blocks", "gfx950", frozenset(_BLOCKS), ranks=2),
    Row("deepseek-v3", "fp8, blocks", "gfx942", frozenset(_BLOCKS | {_EXPERTS_CALL, _ROUTING}), ranks=2),
    Row("gpt-oss", "", "gfx950", frozenset({_EXPERTS_CALL}), ranks=2),
    Row("qwen3", "fp8, blocks", "gfx942", frozenset(_BLOCKS)),
    Row("qwen3", "fp8, blocks", "gfx950", frozenset(_BLOCKS)),
    Row("qwen3-moe", "fp8, blocks", "gfx950", frozenset(_BLOCKS | {_EXPERTS_CALL})),
    Row("qwen3-moe", "quark, channel", "gfx942", frozenset(_TOKENS | {_EXPERTS_CALL})),
    Row("qwen3-moe", "quark, channel", "gfx950", frozenset(_TOKENS | {_EXPERTS_CALL})),
    Row("llama", "quark, tensor", "gfx942", frozenset(_STATIC)),
    Row("llama", "compressed-tensors, INT8", "gfx942", frozenset(_INT8)),
    Row("llama", "quark mxfp4", "gfx950", frozenset(_FOUR_BITS)),
    Row("qwen3-moe", "quark mxfp4", "gfx950", frozenset(_FOUR_BITS | {_EXPERTS_CALL})),
]
ROWS = [
    pytest.param(row, id=f"{row.model}-{row.format}-{row.gpu}-{row.release}-{row.ranks}", marks=marks)
    for rows, marks in ((ALWAYS, ()), (SOMETIMES, (pytest.mark.models,)))
    for row in rows
]


def save(row: Row, directory: Path) -> None:
    if row.model == "gpt-oss":
        save_mxfp4(directory)
        return
    formats = {each.name: each for each in FORMATS + FOUR_BIT_FORMATS}
    save_quantized(MODELS[row.model], formats[row.format], directory)


def generated(directory: Path, ranks: int) -> list[list[int]]:
    if ranks == 1:
        worker = TinyWorker(directory)
        return generate(worker.core(), worker.execute, PROMPTS, 16, 16, 3)
    workers = RankedWorkers(directory, ranks, 1)
    found = generate(workers.core(), workers.execute, PROMPTS, 16, 16, 3)
    workers.close()
    return found


@pytest.mark.parametrize("row", ROWS)
def test_ids_equal_those_of_torch(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(row, tmp_path)
    signatures = published() | (in_development() if row.release == "in development" else {})
    try:
        calls: Counter[str] = install(monkeypatch, signatures, architecture=row.gpu)
        monkeypatch.setattr(REGISTRY["linear"], "reference", rounded_linear(row.model != "gpt-oss"))
        with monkeypatch.context() as torch_alone:
            torch_alone.setitem(backend._DEFAULT_ORDER, "cpu", ())
            wanted = generated(tmp_path, row.ranks)
        assert not calls and len({each for ids in wanted for each in ids}) > 12
        assert generated(tmp_path, row.ranks) == wanted
        assert row.calls <= calls.keys(), row.calls - calls.keys()
        assert "experts" not in backend.ran_in_torch()
    finally:
        monkeypatch.undo()
        backend.resolve(CPU)
