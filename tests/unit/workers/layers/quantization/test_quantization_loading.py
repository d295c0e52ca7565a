"""Scales of fused modules, several schemes in one model, and tensors under several names."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_ops import ChannelFP8
from parallel.communicator import Communicator
from tests.helpers.checkpoints.quantized_formats import FORMATS, QUANTIZED_MODELS, save_quantized
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, checkpoint_of
from tests.helpers.engine.teacher_forcing import TinyWorker
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.models.registry import build_model
from workers.weights.cache_scales import is_cache_scale
from workers.weights.loader import WeightError, describe_schemes, load_directory, load_dummy

CPU = torch.device("cpu")
EXPERTS = QUANTIZED_MODELS[1]
STATIC = next(format for format in FORMATS if format.name == "fp8, static")
BOTH_NAMES = next(format for format in FORMATS if format.name == "fp8, transformers' names")


def build(directory: Path, rank: int = 0, size: int = 1) -> CausalLM:
    context = BuildContext(torch.float32, CPU, Communicator(rank, size), MAX_MODEL_LEN)
    return build_model(checkpoint_of(directory), context)


def silent(done: int, total: int) -> None:
    """Ignores progress."""


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_static_scales_of_fused_modules_become_the_largest(tmp_path: Path, rank: int, size: int) -> None:
    save_quantized(EXPERTS, STATIC, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    names = sorted(name for name in tensors if name.endswith("input_scale"))
    scales = {name: torch.tensor((number % 7 + 1) / 64) for number, name in enumerate(names)}
    save_file(tensors | scales, path)
    model = build(tmp_path, rank, size)
    load_directory(model, tmp_path, silent)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    attention = "model.layers.0.self_attn"
    qkv = model.get_submodule(f"{attention}.qkv_proj").weight
    assert isinstance(qkv, ChannelFP8) and isinstance(experts.gate_up, ChannelFP8)
    largest = max(float(scales[f"{attention}.{name}_proj.input_scale"]) for name in "qkv")
    assert float(qkv.input_scale) == largest
    for matrix, parts in ((experts.gate_up, ("gate", "up")), (experts.down, ("down",))):
        wanted = [
            max(float(scales[f"model.layers.0.mlp.experts.{e}.{part}_proj.input_scale"]) for part in parts)
            for e in range(6)
        ]
        assert matrix.input_scale.tolist() == wanted
        assert matrix.scales.shape == matrix.shape[:2]


def test_a_tensor_has_one_of_its_names(tmp_path: Path) -> None:
    save_quantized(EXPERTS, BOTH_NAMES, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    other = name.removesuffix("_inv")
    save_file(tensors | {other: tensors[name].clone()}, path)
    with pytest.raises(WeightError, match=rf"holds both {re.escape(other)} and {re.escape(name)}, which are"):
        load_directory(build(tmp_path), tmp_path, silent)
    renamed = {key: tensor for key, tensor in tensors.items() if key != name} | {
        other: tensors[name].reshape(1, 1)
    }
    save_file(renamed, path)
    load_directory(build(tmp_path), tmp_path, silent)
    save_file(renamed | {other: tensors[name].expand(3).contiguous()}, path)
    with pytest.raises(
        WeightError, match=rf"{re.escape(other)} has shape \[3\]; the configuration needs \[\] or"
    ):
        load_directory(build(tmp_path), tmp_path, silent)
    del renamed[other]
    save_file(renamed, path)
    with pytest.raises(WeightError, match=rf"the checkpoint lacks {re.escape(other)}$"):
        load_directory(build(tmp_path), tmp_path, silent)


def test_what_was_detected_is_described(tmp_path: Path) -> None:
    save_quantized(EXPERTS, STATIC, tmp_path)
    found = build(tmp_path)
    assert list(describe_schemes(found)) == [
        "layers in FP8 per tensor with static inputs: 1 of experts and 2 linear"
    ]
    load_dummy(found, silent)
    weight = found.get_submodule("model.layers.0.self_attn.o_proj").weight
    assert weight.dequantized(torch.float32).std() > 0 and float(weight.input_scale) == 1 / 16


def test_scales_of_the_cache_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(EXPERTS, STATIC, tmp_path)
    with caplog.at_level("INFO", "atom"):
        TinyWorker(tmp_path)
    (line,) = [line for line in caplog.messages if "scales of the KV cache" in line]
    assert line.startswith(
        "scales of the KV cache in the checkpoint (2, as model.layers.0.self_attn.attn.k_scale)"
    )


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("self_attn.k_scale", True), ("self_attn.v_scale", True), ("self_attn.attn.k_scale", True),
        ("self_attn.k_proj.k_scale", True), ("self_attn.v_proj.v_scale", True), ("self_attn.kv_scale", True),
        ("self_attn.k_proj.output_scale", True), ("self_attn.qkv_proj.k_scale", True),
        ("self_attn.q_scale", True), ("self_attn.prob_output_scale", True),
        ("self_attn.o_proj.output_scale", False), ("self_attn.k_proj.weight_scale", False),
        ("mlp.k_scale", False), ("self_attn.k_scale_2", False),
    ],
)  # fmt: skip
def test_names_of_cache_scales(name: str, known: bool) -> None:
    assert is_cache_scale(f"model.layers.3.{name}") == known
