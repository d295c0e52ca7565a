"""4-bit layouts: words, activation order, and checkpoints that do not fit."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_ops import GroupINT4, PackedINT4, Reordered, backend, linear, pack_linear_weight
from parallel.communicator import Communicator
from tests.helpers.checkpoints.four_bits import (
    AWQ_ORDER,
    FOUR_BIT_MODELS,
    STRAIGHT,
    awq,
    compressed,
    gptq,
    words,
)
from tests.helpers.checkpoints.quantized_formats import StoredFormat, save_quantized
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, Tiny, checkpoint_of
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.layers.quantization.act_order import ordered
from workers.layers.quantization.config import resolve
from workers.layers.quantization.words import (
    EVEN_FIRST,
    numbers_of_pairs,
    one_more,
    pairs_of_numbers,
    pairs_of_words,
    rows_of_words,
)
from workers.models.registry import build_model
from workers.weights.loader import WeightError, load_directory

LLAMA, QWEN3_MOE, _, _ = FOUR_BIT_MODELS


def test_words_are_those_of_the_libraries() -> None:
    """0 to 7 as AutoAWQ and compressed-tensors pack them; the latter's -8 to -1 are stored as 0 to 7."""
    numbers = np.arange(8)[None]
    assert int(words(numbers, 1)[0, 0]) == 0x76543210
    assert int(words(numbers, 1, AWQ_ORDER)[0, 0]) == 0x75316420
    column = torch.arange(8, dtype=torch.uint8)[:, None]
    assert torch.equal(rows_of_words(torch.tensor([[0x76543210]], dtype=torch.int32)), column)
    assert torch.equal(rows_of_words(torch.tensor([[0x75316420]], dtype=torch.int32), EVEN_FIRST), column)


@pytest.mark.parametrize("order", [STRAIGHT, AWQ_ORDER])
def test_words_are_unpacked(order: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(1).integers(0, 16, (16, 24)).astype(np.uint8)
    nibbles = STRAIGHT if order is STRAIGHT else EVEN_FIRST
    assert np.array_equal(rows_of_words(torch.from_numpy(words(numbers, 0, order)), nibbles).numpy(), numbers)
    if order is STRAIGHT:
        pairs = pairs_of_words(torch.from_numpy(words(numbers, 1)))
        assert np.array_equal(numbers_of_pairs(pairs).numpy(), numbers)
        assert torch.equal(pairs_of_numbers(numbers_of_pairs(pairs)), pairs)


def test_zero_points_less_one_overflow_as_whole_words() -> None:
    """A zero point of 0 borrowed from its neighbours when one was subtracted."""
    stored = (0x00000000 - 0x11111111) & 0xFFFFFFFF
    word = torch.tensor([[stored - (1 << 32)]], dtype=torch.int32)
    assert not rows_of_words(one_more(word)).any()


@pytest.mark.parametrize("kept", [slice(0, 256), slice(64, 192)])
def test_activation_order_is_sorted_away(kept: slice) -> None:
    """Also for a rank that keeps some inputs, whose groups are filled up."""
    generator = torch.Generator().manual_seed(2)
    groups = torch.randperm(256, generator=generator)[None, kept] // 64
    inputs = groups.shape[1]
    codes = torch.randint(0, 256, (24, inputs // 2), generator=generator).to(torch.uint8)
    scales = torch.rand(24, 4, generator=generator)
    zeros = torch.randint(0, 16, (24, 4), generator=generator).to(torch.uint8)
    found = ordered(codes, scales, zeros, groups)
    numbers = (numbers_of_pairs(codes).float() - zeros[:, groups[0]]) * scales[:, groups[0]]
    assert isinstance(found, Reordered) and found.shape == (24, inputs)
    assert torch.equal(found.dequantized(torch.float32), numbers)
    x = torch.randn(3, inputs, generator=generator)
    torch.testing.assert_close(linear(x, found), x @ numbers.t(), atol=1e-3, rtol=1e-4)
    stacked = ordered(codes[None], scales[None], zeros[None], groups[None])
    assert torch.equal(stacked.expert(0).dequantized(torch.float32), numbers)


def test_groups_that_are_cut_evenly_are_still_of_32_inputs() -> None:
    """A rank may keep as many inputs of each group, but so few that no kernel reads such groups."""
    groups = (torch.arange(24) % 8)[None]
    codes, zeros = torch.randint(0, 256, (4, 12)).to(torch.uint8), torch.full((4, 8), 3, dtype=torch.uint8)
    found = ordered(codes, torch.ones(4, 8), zeros, groups)
    assert found.weight.shape == (4, 256) and found.weight.scales.shape == (4, 8)
    assert torch.equal(found.dequantized(torch.float32), numbers_of_pairs(codes).float() - 3)


@pytest.mark.usefixtures("torch_ops")
def test_torchs_int4_on_a_cpu_takes_activations_that_are_not_contiguous() -> None:
    backend.resolve(torch.device("cpu"))
    codes, scales = torch.randint(0, 256, (32, 32)).to(torch.uint8), torch.ones(32, 2, dtype=torch.bfloat16)
    weight = pack_linear_weight(GroupINT4(codes, scales))
    both = torch.randn(3, 128).bfloat16()
    assert isinstance(weight, PackedINT4)
    assert torch.equal(linear(both[:, :64], weight), linear(both[:, :64].contiguous(), weight))


def test_groups_that_do_not_fit_are_refused() -> None:
    codes, zeros = torch.zeros(2, 2, 32, dtype=torch.uint8)
    tensors = codes, torch.ones(2, 2), zeros[:, :2]
    groups = torch.arange(64)[None] // 32
    with pytest.raises(ValueError, match=r"g_idx of fused modules \(as q_proj, k_proj and v_proj\) differs"):
        ordered(*tensors, torch.cat((groups, groups.flip(1))))
    with pytest.raises(ValueError, match="g_idx names groups 0 to 3; there are 2"):
        ordered(*tensors, torch.arange(64)[None] // 16)


def build(directory: Path, rank: int = 0, size: int = 1) -> CausalLM:
    context = BuildContext(torch.float32, torch.device("cpu"), Communicator(rank, size), MAX_MODEL_LEN)
    return build_model(checkpoint_of(directory), context)


@pytest.mark.parametrize(
    ("format", "tensor", "changed", "message"),
    [
        (awq(32), "qweight", (128, 8), r"has shape \[128, 8\]; the configuration needs \[128, 32\]"),
        (awq(64), "qzeros", (1, 32), r"has shape \[1, 32\]; the configuration needs \[2, 32\]"),
        (gptq(32), "scales", (4, 128), r"has shape \[4, 128\]; the configuration needs \[4, 256\]"),
        (gptq(32, act_order=True), "g_idx", (64,), r"has shape \[64\]; the configuration needs \[128\]"),
        (compressed(32), "weight_packed", (256, 32), r"has shape \[256, 32\]; .* needs \[256, 16\]"),
        (compressed(32, False), "weight_zero_point", None, r"lacks model.*q_proj\.weight_zero_point"),
        (gptq(32, act_order=True), "g_idx", None, r"the checkpoint lacks model.*q_proj\.g_idx"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, format: StoredFormat, tensor: str, changed: tuple[int, ...] | None, message: str
) -> None:
    save_quantized(LLAMA, format, tmp_path)
    path, name = tmp_path / "model.safetensors", f"model.layers.0.self_attn.q_proj.{tensor}"
    tensors = load_file(path)
    old = tensors.pop(name)
    if changed is not None:
        tensors[name] = torch.zeros(changed, dtype=old.dtype)
    save_file(tensors, path)
    with pytest.raises(WeightError, match=message):
        load_directory(build(tmp_path), tmp_path, lambda done, total: None)


@pytest.mark.parametrize(
    ("model", "format", "size", "message"),
    [
        (Tiny("narrow", "llama", 1, LLAMA.config | {"intermediate_size": 64}), awq(64), 2,
         "mlp: 64 features are 1 blocks of 64, too few for --tensor-parallel-size 2"),
        (Tiny("heads", "llama", 1, LLAMA.config | {"head_dim": 32, "num_attention_heads": 2,
                                                   "num_key_value_heads": 2}), compressed(64), 2,
         "o_proj: with --tensor-parallel-size 2 this rank would keep inputs 0 to 32 of 64, which cuts"),
        (Tiny("odd", "llama", 1, LLAMA.config | {"hidden_size": 96}), compressed(64), 1,
         r"qkv_proj: 96 inputs, not a multiple of 64 \(INT4"),
    ],
    ids=lambda value: value.name if isinstance(value, Tiny | StoredFormat) else None,
)  # fmt: skip
def test_no_rank_cuts_a_group(
    tmp_path: Path, model: Tiny, format: StoredFormat, size: int, message: str
) -> None:
    store = compressed(32) if format.name.startswith("pack") else awq(32)
    save_quantized(model, replace(format, store=store.store), tmp_path)
    with pytest.raises(ValueError, match=re.escape(message) if "(" not in message else message):
        build(tmp_path, 0, size)


CHANGES = [
    ({"bits": 8}, "bits 8; supported: 4"),
    ({"group_size": 16}, "group_size 16; supported: 32, 64, 128, -1"),
    ({"version": "gemv"}, "version 'gemv'; supported: gemm, GEMM"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_variants_of_awq_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"quantized (awq) with {message}")):
        resolve({"quantization_config": {"quant_method": "awq"} | change})
