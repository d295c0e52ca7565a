"""Checkpoints in blocks of FP8, compared with transformers on the dequantized numbers."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_ops import BlockFP8
from parallel.communicator import Communicator
from parallel.expert import expert_dispatch
from parallel.mesh import Mesh
from tests.helpers.checkpoints.fp8 import CONFIG, FP8_MODELS, QUANTIZED, numbers, quantized, save_fp8
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    Tiny,
    checkpoint_of,
    hf_logits,
    prompt_of,
    tiny,
)
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.parallel.thread_ranks import on_ranks
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.layers.linear import tp_range
from workers.layers.quantization.config import resolve
from workers.layers.weighted import ShardRange, ShardSpec, WeightedLayer
from workers.models.registry import build_model
from workers.weights.loader import WeightError, load_directory, load_dummy, load_weights

CPU = torch.device("cpu")
IDS = prompt_of(48, seed=4)
DENSE, EXPERTS, LATENT = FP8_MODELS
by_name = pytest.mark.parametrize("model", FP8_MODELS, ids=lambda model: model.name)


def build(directory: Path, rank: int = 0, size: int = 1) -> CausalLM:
    context = BuildContext(torch.float32, CPU, Communicator(rank, size), MAX_MODEL_LEN)
    return build_model(checkpoint_of(directory), context)


def silent(done: int, total: int) -> None:
    pass


def nothing_is_read(done: int, total: int) -> None:
    raise AssertionError("a tensor was read before all headers were checked")


def run_on_ranks(directory: Path, size: int, expert_parallel: bool = False) -> list[tuple[torch.Tensor, int]]:
    """Logits [T, V] in two chunks, and the bytes of the weights, on each rank."""

    def run(tp: Communicator) -> tuple[torch.Tensor, int]:
        ours = TinyWorker(directory, tp=tp, expert_parallel=expert_parallel)
        core = ours.core()
        core.add(0, IDS)
        return forced_logits(ours.worker, core, 0, [30, 18]), ours.loaded.weight_bytes

    return on_ranks(size, run)


@pytest.mark.parametrize("size", [1, 2])
@by_name
def test_logits_equal_those_of_the_dequantized_numbers(tmp_path: Path, model: Tiny, size: int) -> None:
    expected = hf_logits(save_fp8(model, tmp_path), IDS)
    assert expected.std() > 0.5
    for found, _ in run_on_ranks(tmp_path, size):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", [EXPERTS, LATENT], ids=lambda model: model.name)
def test_whole_experts_may_be_on_other_ranks(tmp_path: Path, model: Tiny) -> None:
    expected = hf_logits(save_fp8(model, tmp_path), IDS)
    for found, _ in run_on_ranks(tmp_path, 2, expert_parallel=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@by_name
def test_weights_stay_packed_in_memory(tmp_path: Path, model: Tiny) -> None:
    """As many bytes as the file holds; only kv_b_proj is dequantized."""
    save_fp8(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stored = sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            stored += 3 * tensor.nbytes - tensors[f"{name}_scale_inv"].nbytes
    codes = sum(tensor.nbytes for tensor in tensors.values() if tensor.dtype == torch.float8_e4m3fn)
    assert codes > stored / 4
    ((_, held),) = run_on_ranks(tmp_path, 1)
    assert held == stored
    first, second = (held for _, held in run_on_ranks(tmp_path, 2))
    replicated = held if model is LATENT else 0  # latents are replicated, and so are norms and routers
    assert codes < first + second < 1.3 * stored + replicated


def test_what_is_held_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_fp8(DENSE, tmp_path)
    with caplog.at_level(logging.INFO, "atom"):
        TinyWorker(tmp_path)
    (line,) = [line for line in caplog.messages if line.startswith("weights on rank 0")]
    assert re.search(r"12 BlockFP8 \(1\.\d MiB\), 1 PackedOneDNN .*, \d+ plain", line), line


def test_excluded_layers_are_plain(tmp_path: Path) -> None:
    excluded = ["model.layers.0.self_attn", "model.layers.1.mlp.down_proj", "re:model.layers.2.mlp.*"]
    kept = re.compile(r"layers\.(0\.self_attn|1\.mlp\.down_proj|2\.mlp\.)")
    reference = save_fp8(
        DENSE, tmp_path, lambda name: kept.search(name) is not None,
        modules_to_not_convert=["lm_head", *excluded],
    )  # fmt: skip
    ((found, _),) = run_on_ranks(tmp_path, 1)
    torch.testing.assert_close(found, hf_logits(reference, IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_parts_in_different_formats_become_plain(
    tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    excluded = ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"]
    kept = re.compile("|".join(map(re.escape, excluded)))
    reference = save_fp8(
        DENSE, tmp_path, lambda name: kept.search(name) is not None, modules_to_not_convert=excluded
    )
    with caplog.at_level("INFO", "atom"):
        for found, _ in run_on_ranks(tmp_path, size):
            torch.testing.assert_close(found, hf_logits(reference, IDS), atol=1e-4, rtol=1e-4)
    assert "quantization: layers that are dequantized when they are loaded: 2" in caplog.messages


def test_reordered_matrices_are_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Qwen3-Next publishes: in_proj_qkvz in blocks, in_proj_ba plain, and queries next to their gates."""
    settings = {
        "num_hidden_layers": 4, "hidden_size": 128, "head_dim": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "shared_expert_intermediate_size": 128, "moe_intermediate_size": 128,
        "num_experts": 3, "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    }  # fmt: skip
    model = Tiny("next", "qwen3_next", 2, tiny("qwen3-next").config | settings)
    excluded = ["lm_head", "re:.*in_proj_ba", "re:.*mlp.gate$", "re:.*shared_expert_gate"]
    reference = save_fp8(model, tmp_path, modules_to_not_convert=excluded)
    with caplog.at_level("INFO", "atom"):
        ((found, _),) = run_on_ranks(tmp_path, 1)
    torch.testing.assert_close(found, hf_logits(reference, IDS), atol=2e-4, rtol=2e-4)
    assert "quantization: layers that are dequantized when they are loaded: 4" in caplog.messages


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (EXPERTS, {"ignored_layers": ["model.layers.1.mlp.experts.2.up_proj"]},
         r"fused into model\.layers\.1\.mlp\.experts.*experts\.2\.up_proj: plain, others: FP8 in"),
        (EXPERTS, {"ignored_layers": ["up_proj"]}, r"fused into model\.layers\.1\.mlp\.experts"),
    ],
)  # fmt: skip
def test_experts_of_a_layer_must_agree(
    tmp_path: Path, model: Tiny, config: dict[str, Any], message: str
) -> None:
    save_fp8(model, tmp_path, **config)
    with pytest.raises(ValueError, match=message):
        build(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size \[128\], which is not two positive numbers"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'; supported: dynamic"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'; supported: e4m3"),
        ({"quant_method": "mxfp4"}, r"quantized \(mxfp4\): supported for model type gpt_oss"),
        ({"ignored_layers": "lm_head"}, "ignored_layers that is not a list of module names: 'lm_head'"),
        ({"ignored_layers": ["lm_head", "re:mlp.("]},
         r"'mlp\.\(', not a regular expression for modules: missing \)"),
        ({"quant_method": ["fp8"]}, r"quantized \(\['fp8'\]\): not supported"),
        ({"quant_method": "hqq"}, r"quantized \(hqq\): not supported, use a plain checkpoint"),
    ],
)  # fmt: skip
def test_variants_that_cannot_run_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    save_fp8(DENSE, tmp_path, **config)
    with pytest.raises(ValueError, match=message):
        checkpoint_of(tmp_path)


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        (DENSE, 4, r"self_attn\.qkv_proj: with --tensor-parallel-size 4 this rank would keep outputs "
                   "64 to 128 of 256, which cuts a block of 128"),
        (Tiny("ragged", "qwen3", 1, DENSE.config | {"intermediate_size": 320}), 1,
         r"mlp\.gate_up_proj: its part 0 has 320 outputs, not a multiple of 128"),
        (Tiny("narrow", "qwen3", 1, DENSE.config | {"intermediate_size": 128}), 2,
         "mlp: 128 features are 1 blocks of 128, too few for --tensor-parallel-size 2"),
    ],
)  # fmt: skip
def test_no_rank_cuts_a_block(tmp_path: Path, model: Tiny, size: int, message: str) -> None:
    save_fp8(model, tmp_path)
    with pytest.raises(ValueError, match=message):
        build(tmp_path, min(1, size - 1), size)


@pytest.mark.parametrize(
    ("total", "unit", "size", "expected"),
    [
        (384, 128, 2, [(0, 256), (256, 128)]),
        (700, 128, 3, [(0, 256), (256, 256), (512, 188)]),
        (2880, 32, 8, [(0, 384), (384, 384), *((768 + 352 * rank, 352) for rank in range(6))]),
        (10, 1, 3, [(0, 4), (4, 3), (7, 3)]),
    ],
)
def test_features_are_split_between_blocks(
    total: int, unit: int, size: int, expected: list[tuple[int, int]]
) -> None:
    contexts = [BuildContext(torch.float32, CPU, Communicator(rank, size), 8) for rank in range(size)]
    ranges = [tp_range(total, context, unit) for context in contexts]
    assert [(kept.start, kept.size) for kept in ranges] == expected


@pytest.mark.parametrize("stated", ["fp8", [], 0, ""])
def test_a_quantization_config_is_an_object(tmp_path: Path, stated: object) -> None:
    save_fp8(DENSE, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))
    with pytest.raises(ValueError, match=re.escape(f"quantization_config is not an object: {stated!r}")):
        checkpoint_of(tmp_path)


SCALE = "model.layers.1.mlp.down_proj.weight_scale_inv"


def test_missing_scales_and_other_dtypes_are_named(tmp_path: Path) -> None:
    save_fp8(DENSE, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    save_file({name: tensor for name, tensor in whole.items() if name != SCALE}, path)
    with pytest.raises(WeightError, match=f"the checkpoint lacks {SCALE}"):
        load_directory(build(tmp_path), tmp_path, silent)
    codes = SCALE.removesuffix("_scale_inv")
    for name, tensor, message in (
        (codes, whole[codes].bfloat16(), "has dtype bfloat16; the configuration needs float8_e4m3fn"),
        (SCALE, whole[SCALE].to(torch.int32), "has dtype int32; the configuration needs float64 or float32"),
        ("model.norm.weight", whole["model.norm.weight"].to(torch.float8_e4m3fn), "has dtype float8_e4m3fn"),
        (SCALE, whole[SCALE][:1], r"has shape \[1, 3\]; the configuration needs \[2, 3\] or \[2, 1, 3, 1\]"),
    ):
        save_file(whole | {name: tensor.contiguous()}, path)
        with pytest.raises(WeightError, match=f"{name} {message}"):
            load_directory(build(tmp_path), tmp_path, nothing_is_read)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("unmapped", ["0", "1"])
def test_scales_may_have_other_dtypes(
    tmp_path: Path, dtype: torch.dtype, unmapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bfloat16 or as powers of two, which float32 holds exactly."""
    monkeypatch.setenv("ATOM_DISABLE_MMAP", unmapped)
    save_fp8(DENSE, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    powers = whole[SCALE].to(torch.float8_e8m0fnu if dtype == torch.uint8 else dtype)
    save_file(whole | {SCALE: powers.view(dtype)}, path)
    model = build(tmp_path)
    load_directory(model, tmp_path, silent)
    weight = model.get_submodule("model.layers.1.mlp.down_proj").weight
    assert weight.scales.dtype == torch.float32
    assert torch.equal(weight.scales, powers.float())


def test_dummy_weights_keep_the_scale_of_plain_ones(tmp_path: Path) -> None:
    save_fp8(EXPERTS, tmp_path)
    model = build(tmp_path)
    load_dummy(model, silent)
    down = model.get_submodule("model.layers.1.mlp.experts").down
    gate_up = model.get_submodule("model.layers.0.mlp.gate_up_proj").weight
    assert gate_up.dequantized(torch.float32).std() == pytest.approx(200**-0.5, rel=0.1)
    assert 0 < down.dequantized(torch.float32).std() < 0.02


def test_dummy_weights_of_experts_that_are_spread_over_ranks(tmp_path: Path) -> None:
    save_fp8(EXPERTS, tmp_path)
    for rank in range(2):
        tp = Communicator(rank, 2)
        dispatch = expert_dispatch(Mesh(CPU, tp=tp, ep=tp), expert_parallel=True)
        context = BuildContext(torch.float32, CPU, tp, MAX_MODEL_LEN, dispatch=dispatch)
        model = build_model(checkpoint_of(tmp_path), context)
        load_dummy(model, silent)
        down = model.get_submodule("model.layers.1.mlp.experts").down
        assert down.shape == (3, 200, 256)
        assert 0 < down.dequantized(torch.float32).std() < 0.02


def test_the_helper_quantizes_within_the_format() -> None:
    matrix = torch.randn(200, 300)
    error = numbers(*quantized(matrix)) - matrix
    assert 0 < error.abs().max() < 0.0626 * matrix.abs().max()
    assert QUANTIZED.search("model.layers.0.mlp.experts.3.gate_proj.weight")


def stream(directory: Path, seed: int = 5) -> list[tuple[str, torch.Tensor]]:
    """All tensors of the checkpoint, in a random order."""
    tensors = list(load_file(directory / "model.safetensors").items())
    order = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(seed)).tolist()
    return [tensors[index] for index in order]


@by_name
def test_tensors_may_arrive_from_a_stream_in_any_order(tmp_path: Path, model: Tiny) -> None:
    save_fp8(model, tmp_path)
    one, two = build(tmp_path, 1, 2), build(tmp_path, 1, 2)
    load_directory(one, tmp_path, silent)
    load_weights(two, iter(stream(tmp_path)), silent)
    for mine, other in zip(one.modules(), two.modules(), strict=True):
        if hasattr(mine, "held_tensors"):
            pairs = list(zip(mine.held_tensors(), other.held_tensors(), strict=True))
            dense = [
                (left.to_dense(), right.to_dense()) if left.is_mkldnn else (left, right)
                for left, right in pairs
            ]
            assert all(torch.equal(left.float(), right.float()) for left, right in dense)


def test_a_stream_is_as_strict_as_a_directory(tmp_path: Path) -> None:
    save_fp8(DENSE, tmp_path)
    tensors = stream(tmp_path)
    name, tensor = tensors[7]
    for changed, message in (
        (tensors[:7] + tensors[8:], f"the checkpoint lacks {name}$"),
        ([*tensors, ("model.extra", tensor)], "does not use: model.extra"),
        ([*tensors, (name, tensor)], f"{name} arrived twice"),
        ([*tensors[:7], (name, tensor[:3]), *tensors[8:]], f"{name} has shape"),
    ):
        with pytest.raises(WeightError, match=message):
            load_weights(build(tmp_path), changed, silent)
    load_weights(build(tmp_path), [*tensors, ("model.layers.0.rotary_emb.inv_freq", tensor)], silent)


class TwoModules(CausalLM):
    """Two matrices stacked into one; this rank keeps the first and nothing of the second."""

    packed_modules_mapping: ClassVar = {"both": ("mine", "theirs")}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        self.both = WeightedLayer()
        kept = [ShardSpec((128, 64), 0, ShardRange(128, 0, size)) for size in (128, 0)]
        at = build.at("both")
        self.both.add_matrix("weight", build.quantization.linear(at.prefix), kept, at)

    def forward(self, *args: Any) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_tensors_of_other_ranks_are_neither_needed_nor_unused(tmp_path: Path) -> None:
    """A directory or a stream may hold them or not; where they arrive their shape is checked."""
    quantization = resolve({"quantization_config": CONFIG}, TwoModules.packed_modules_mapping)

    def loaded(tensors: dict[str, torch.Tensor], from_directory: bool) -> torch.Tensor:
        model = TwoModules({}, BuildContext(torch.float32, CPU, Communicator(), 8, quantization=quantization))
        if from_directory:
            save_file(tensors, tmp_path / "model.safetensors")
            load_directory(model, tmp_path, silent)
        else:
            load_weights(model, tensors.items(), silent)
        weight = model.both.loaded("weight")
        assert isinstance(weight, BlockFP8) and weight.shape == (128, 64)
        return weight.dequantized(torch.float32)

    matrices = {name: quantized(torch.randn(128, 64)) for name in ("mine", "theirs")}
    every = {
        f"{name}.weight{suffix}": tensor
        for name, stored in matrices.items()
        for suffix, tensor in zip(("", "_scale_inv"), stored, strict=True)
    }
    own = {name: tensor for name, tensor in every.items() if name.startswith("mine")}
    for from_directory in (True, False):
        for tensors in (every, own):
            assert torch.equal(loaded(tensors, from_directory), numbers(*matrices["mine"]))
        with pytest.raises(WeightError, match="lacks mine.weight_scale_inv"):
            loaded(
                {name: each for name, each in every.items() if name != "mine.weight_scale_inv"},
                from_directory,
            )
    with pytest.raises(WeightError, match=r"theirs.weight has shape \[3, 64\]"):
        loaded(every | {"theirs.weight": every["theirs.weight"][:3]}, False)
