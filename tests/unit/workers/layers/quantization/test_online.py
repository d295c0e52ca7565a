"""--online-quant-config: a plain checkpoint is quantized while it is loaded."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atom.shared.config.fields import ConfigError
from atom.shared.config.online_quantization import FORMATS, online_quantization
from atom_ops import MXFP4, BlockFP8, ChannelFP8, ChannelINT8, GroupINT4, Quantized, Weight, backend
from parallel.communicator import Communicator
from tests.helpers.checkpoints.four_bits import FOUR_BIT_MODELS
from tests.helpers.checkpoints.fp8 import CONFIG, FP8_MODELS
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, Tiny, checkpoint_of, save_tiny, tiny
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.layers.moe.moe import Experts
from workers.layers.quantization import rounding
from workers.layers.quantization.online import scheme_of
from workers.models.registry import build_model
from workers.weights.loader import load_directory, load_dummy

CPU = torch.device("cpu")
DENSE, EXPERTS, LATENT = FP8_MODELS
GROUPED_EXPERTS = FOUR_BIT_MODELS[1]
KINDS = {
    "ptpc_fp8": (ChannelFP8, 0.04),
    "per_block_fp8": (BlockFP8, 0.04),
    "per_block128_fp8": (BlockFP8, 0.04),
    "ptpc_int8": (ChannelINT8, 0.015),
    "mxfp4": (MXFP4, 0.15),
    "int4_g32": (GroupINT4, 0.12),
    "int4_g64": (GroupINT4, 0.13),
    "int4_g128": (GroupINT4, 0.14),
}
"""Format -> the type of its weights, and their largest error relative to the numbers."""


def built(directory: Path, settings: dict[str, Any], rank: int = 0, size: int = 1) -> CausalLM:
    """The model without its weights; no provider packs them, whatever an earlier test has set."""
    backend.resolve(CPU, ["torch"])
    context = BuildContext(torch.bfloat16, CPU, Communicator(rank, size), MAX_MODEL_LEN)
    return build_model(checkpoint_of(directory), context, online_quantization(json.dumps(settings)))


def loaded(directory: Path, settings: dict[str, Any], rank: int = 0, size: int = 1) -> CausalLM:
    model = built(directory, settings, rank, size)
    load_directory(model, directory, lambda done, total: None)
    return model


def whole(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, Quantized)
    return weight.dequantized(torch.float32)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_every_format_is_in_the_table() -> None:
    assert KINDS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_rounded_numbers_are_near(name: str) -> None:
    """Also rows and groups of zeros, and those that are ten thousand times smaller than others."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(256, 384, generator=generator).mul_(torch.rand(256, 1, generator=generator))
    matrix[3] = 0
    matrix[:128, :128] *= 1e-4
    matrix[140, 256:] = 0
    scheme = scheme_of(name)
    assert scheme.quantize is not None
    kind, bound = KINDS[name]
    weight = scheme.weight(*scheme.quantize(matrix.bfloat16()))
    assert isinstance(weight, kind)
    numbers = whole(weight)
    assert not numbers[3].any() and not numbers[140, 256:].any()
    assert error(numbers, matrix) < bound
    if not isinstance(weight, ChannelFP8 | ChannelINT8):  # whose small numbers share a scale with large ones
        assert error(numbers[:128, :128], matrix[:128, :128]) < bound


def test_fp8_takes_better_scales_than_the_smallest() -> None:
    matrix = torch.randn(128, 384, generator=torch.Generator().manual_seed(1))
    smallest = matrix.abs().amax(1, keepdim=True) / 448
    plain = (matrix / smallest).to(torch.float8_e4m3fn).float() * smallest
    codes, scales = rounding.to_channel_fp8(matrix)
    found = codes.float() * scales
    rows = (found - matrix).norm(dim=1) <= (plain - matrix).norm(dim=1)
    assert rows.all() and error(found, matrix) < 0.98 * error(plain, matrix)
    codes, scales = rounding.to_block_fp8(128, 128, matrix)
    assert scales.shape == (1, 3) and (codes.float().abs().max() <= 448)


def test_mxfp4_rounds_to_the_nearest_and_halves_to_even() -> None:
    row = torch.zeros(1, 32)
    row[0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, -3.5, -5.0])
    scheme = scheme_of("mxfp4")
    assert scheme.quantize is not None
    numbers = whole(scheme.weight(*scheme.quantize(row.bfloat16())))
    assert numbers[0, :8].tolist() == [6, 0, 1, 1, 2, 2, -4, -4]


@pytest.mark.parametrize(
    ("model", "name"),
    [(DENSE, "ptpc_fp8"), (DENSE, "ptpc_int8"), (EXPERTS, "per_block_fp8"), (LATENT, "int4_g64"),
     (LATENT, "mxfp4")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)  # fmt: skip
def test_ranks_have_parts_of_the_same_numbers(tmp_path: Path, model: Tiny, name: str) -> None:
    """As one rank has; embeddings, LM head, router and norms are plain."""
    save_tiny(model, tmp_path)
    settings = {"global_quant_config": name}
    one = loaded(tmp_path, settings)
    two = [loaded(tmp_path, settings, rank, 2) for rank in range(2)]
    quantized = 0
    for path, layer in one.named_modules():
        weight = (
            getattr(layer, "down", None) if isinstance(layer, Experts) else getattr(layer, "weight", None)
        )
        if not isinstance(weight, Quantized):
            continue
        assert isinstance(weight, KINDS[name][0])
        quantized += 1
        if path.endswith(("o_proj", "down_proj", "experts")):
            parts = [other.get_submodule(path) for other in two]
            found = [part.down if isinstance(part, Experts) else part.weight for part in parts]
            assert torch.equal(torch.cat([whole(each) for each in found], -1), whole(weight)), path
    assert quantized >= 10
    stored = load_file(tmp_path / "model.safetensors")
    o_proj = "model.layers.1.self_attn.o_proj"
    assert error(whole(one.get_submodule(o_proj).weight), stored[f"{o_proj}.weight"]) < KINDS[name][1]
    assert isinstance(one.get_submodule("model.embed_tokens").weight, torch.Tensor)


def test_the_stacked_experts_of_gpt_oss_are_quantized(tmp_path: Path) -> None:
    """Whose plain matrices are transposed, with the rows of gate and up in turn."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    save_tiny(Tiny("plain", "gpt_oss", 1, tiny("gpt-oss").config | sizes), tmp_path)
    experts = loaded(tmp_path, {"layer_quant_config": {"*experts*": "mxfp4"}}).get_submodule(
        "model.layers.0.mlp.experts"
    )
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    gate, up = whole(experts.gate_up).chunk(2, 1)
    assert error(gate, stored.transpose(1, 2)[:, 0::2]) < 0.15
    assert error(up, stored.transpose(1, 2)[:, 1::2]) < 0.15


def test_exclusions_come_first_then_patterns_in_order(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 3}
    save_tiny(replace(GROUPED_EXPERTS, config=GROUPED_EXPERTS.config | layers), tmp_path)
    settings = {
        "global_quant_config": "ptpc_fp8",
        "layer_quant_config": {"*.layers.1.*experts*": "mxfp4", "*expert*": "int4_g64"},
        "exclude_layer": ["lm_head", "*.gate", "model.layers.2.self_attn"],
    }
    model = built(tmp_path, settings)
    kinds = {
        path: schemes for path, layer in model.named_modules() if (schemes := getattr(layer, "schemes", None))
    }
    names = {path: {scheme.name for scheme in found.values()} for path, found in kinds.items()}
    assert names["model.layers.1.mlp.experts"] == {"MXFP4"}
    assert names["model.layers.2.mlp.experts"] == {"INT4 in groups of 64 inputs"}
    assert names["model.layers.1.self_attn.o_proj"] == {"FP8 per channel"}
    assert names["model.layers.2.self_attn.qkv_proj"] == {"plain"}


def test_dummy_weights_are_quantized_too(tmp_path: Path) -> None:
    save_tiny(GROUPED_EXPERTS, tmp_path)
    model = built(tmp_path, {"global_quant_config": "int4_g64"})
    load_dummy(model, lambda done, total: None)
    qkv = whole(model.get_submodule("model.layers.0.self_attn.qkv_proj").weight)
    assert qkv.std() == pytest.approx(qkv.shape[1] ** -0.5, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "names no format: give global_quant_config or layer_quant_config"),
        ({"global_quant_config": "fp8"}, r'the format "fp8" is not supported; use ptpc_fp8, per_block_fp8'),
        ({"layer_quant_config": {"*": 8}}, "the format 8 is not supported"),
        ({"layer_quant_config": ["*"]}, "layer_quant_config is .*: it must be an object"),
        ({"global_quant_config": "mxfp4", "exclude_layer": [3]}, "exclude_layer is .*: it must be a list"),
        ({"global_quant_config": "mxfp4", "exclude": []}, "exclude is not supported; use"),
    ],
)  # fmt: skip
def test_settings_that_cannot_act_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        online_quantization(json.dumps(settings))


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    save_tiny(DENSE, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": CONFIG}))
    with pytest.raises(ValueError, match=re.escape("this one is quantized (fp8): omit the flag")):
        built(tmp_path, {"global_quant_config": "mxfp4"})


def test_a_matrix_that_does_not_divide_into_groups_is_named(tmp_path: Path) -> None:
    save_tiny(DENSE, tmp_path)  # 200 inputs
    with pytest.raises(
        ValueError, match=r"model\.layers\.0.*qkv_proj: 200 inputs, not a multiple of 128 .*INT4"
    ):
        built(tmp_path, {"global_quant_config": "int4_g128"})


LAYER = "model.layers.0"
EVERYTHING = {"global_quant_config": "ptpc_fp8"}
MISSING: list[tuple[dict[str, Any], str]] = [
    ({"layer_quant_config": {"*.mpl.*": "mxfp4"}},
     f"layer_quant_config '*.mpl.*' names no layer that can be quantized; layers have names as {LAYER}."),
    ({"layer_quant_config": {"*mlp*": "ptpc_fp8", "*experts*": "mxfp4"}},
     "layer_quant_config '*experts*' does nothing: '*mlp*' goes before it and names its layers"),
    ({"layer_quant_config": {"*experts.4.*": "mxfp4"}}, "'*experts.4.*' names no layer that can be"),
    ({"layer_quant_config": {"lm_head": "mxfp4"}}, "'lm_head' names no layer that can be quantized"),
    (EVERYTHING | {"exclude_layer": ["lm_head", "re:.*layers\\.7\\."]},
     "exclude_layer 're:.*layers\\\\.7\\\\.' names no layer; layers have names as"),
    (EVERYTHING | {"exclude_layer": ["*"]}, "all layers are excluded, so it does nothing: omit it"),
    (EVERYTHING | {"exclude_layer": ["*experts.1.*"]},
     "--online-quant-config has different formats for modules that are fused into model.layers.0.mlp.experts,"
     " which is not supported: model.layers.0.mlp.experts.1.gate_proj: plain, others: FP8 per channel"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), MISSING)
def test_a_pattern_that_does_nothing_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    save_tiny(GROUPED_EXPERTS, tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        built(tmp_path, settings)


def test_patterns_that_name_a_part_of_a_fused_layer_or_a_plain_module_are_used(tmp_path: Path) -> None:
    """The router has another name in the checkpoint of GPT-OSS; a tied LM head is no module."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    save_tiny(Tiny("plain", "gpt_oss", 1, tiny("gpt-oss").config | sizes), tmp_path)
    layers = {"*.q_proj": "ptpc_fp8", "*.k_proj": "ptpc_int8", "*experts": "mxfp4"}
    plain = ["*.router", "lm_head", "model.embed_tokens", "*norm*", "re:.*layers\\.1\\.self_attn\\."]
    model = built(tmp_path, {"layer_quant_config": layers, "exclude_layer": plain})
    assert model.get_submodule(f"{LAYER}.self_attn.qkv_proj").dequantizes


def test_always_plain_layers_cannot_be_named(tmp_path: Path) -> None:
    save_tiny(LATENT, tmp_path)
    message = "'*kv_b_proj' names layers that are always plain (kv_b_proj): omit it"
    with pytest.raises(ValueError, match=re.escape(message)):
        built(tmp_path, {"layer_quant_config": {"*kv_b_proj": "mxfp4"}})
