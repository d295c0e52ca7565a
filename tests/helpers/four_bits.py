"""Tiny checkpoints in the 4-bit layouts of AWQ, GPTQ, compressed-tensors and Quark, packed by numpy alone."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers.tiny_models import Tiny, save_tiny

Arrays = dict[str, np.ndarray]
GROUP = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
STRAIGHT = tuple(range(8))

_HEADS = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MODELS = {
    # On two ranks the 192 features are 3 and 3 groups of 32, or 2 and 1 of 64.
    "llama": Tiny("llama", "llama", 8, _HEADS | {"intermediate_size": 192}),
    "qwen3_moe": Tiny(
        "qwen3-moe", "qwen3_moe", 3,
        _HEADS | _EXPERTS | {"intermediate_size": 128, "num_experts": 4, "mlp_only_layers": [0]}),
    "deepseek_v3": Tiny(
        "deepseek-v3", "deepseek_v3", 1,
        _EXPERTS | {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4,
                    "num_key_value_heads": 4, "head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 64,
                    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
                    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}),
}  # fmt: skip
MATRICES = re.compile(r"\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight$")
ROUTED = re.compile(r"\.mlp\.experts\..*_proj\.weight$")


@dataclass(frozen=True)
class Stored:
    """A quantized matrix."""

    tensors: Arrays
    """By the last part of the name."""
    numbers: np.ndarray
    """What it stands for, [O, I]."""


@dataclass(frozen=True)
class Layout:
    """One way to store a matrix, and the config that says so."""

    name: str
    store: Callable[[np.ndarray], Stored]
    config: dict[str, Any]
    matrices: re.Pattern[str] = MATRICES


def words(numbers: np.ndarray, axis: int, order: tuple[int, ...] = STRAIGHT) -> np.ndarray:
    """Eight numbers along `axis` in a word; nibble i has number order[i]."""
    moved = np.moveaxis(numbers.astype(np.uint32) & 15, axis, -1)
    packed = np.zeros((*moved.shape[:-1], moved.shape[-1] // 8), np.uint32)
    for nibble, number in enumerate(order):
        packed |= moved[..., number::8] << np.uint32(4 * nibble)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def _rounded(
    matrix: np.ndarray, group: int, symmetric: bool, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes [O, I], scales and zero points [O, G], and the numbers; `groups` has the group of each input."""
    if groups is None:
        groups = np.arange(matrix.shape[1]) // group
    count = groups.max() + 1
    low = np.stack([matrix[:, groups == each].min(1) for each in range(count)], 1)
    high = np.stack([matrix[:, groups == each].max(1) for each in range(count)], 1)
    if symmetric:
        scales = (np.maximum(-low, high) / 7.5).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 1, 15).astype(int)
    wide = scales.astype(np.float32)[:, groups]
    codes = np.clip(np.round(matrix / wide + zeros[:, groups]), 0, 15).astype(int)
    return codes, scales, zeros, (codes - zeros[:, groups]) * wide


def awq(group: int) -> Layout:
    def store(matrix: np.ndarray) -> Stored:
        codes, scales, zeros, numbers = _rounded(matrix, group, symmetric=False)
        tensors = {
            "qweight": words(codes.T, 1, AWQ_ORDER),
            "qzeros": words(zeros.T, 1, AWQ_ORDER),
            "scales": scales.T,
        }
        return Stored(tensors, numbers)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
              "modules_to_not_convert": None}  # fmt: skip
    return Layout(f"awq-{group}", store, config)


def gptq(group: int, act_order: bool = False, v2: bool = False, symmetric: bool = True) -> Layout:
    def store(matrix: np.ndarray) -> Stored:
        inputs = matrix.shape[1]
        size = inputs if group == -1 else group
        # Matrices with the same inputs have the same order, as q, k and v.
        groups = (
            np.random.default_rng(inputs).permutation(inputs) // size
            if act_order
            else np.arange(inputs) // size
        )
        codes, scales, zeros, numbers = _rounded(matrix, size, symmetric, groups)
        tensors = {
            "qweight": words(codes.T, 0),
            "qzeros": words((zeros if v2 else zeros - 1).T, 1),
            "scales": scales.T,
            "g_idx": groups.astype(np.int32),
        }
        return Stored(tensors, numbers)

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order, "sym": symmetric,
              "lm_head": False, "checkpoint_format": "gptq_v2" if v2 else "gptq"}  # fmt: skip
    name = f"gptq-{'channel' if group == -1 else group}{'-act-order' if act_order else ''}"
    return Layout(f"{name}{'-v2' if v2 else ''}{'' if symmetric else '-zeros'}", store, config)


def compressed(group: int | None, symmetric: bool = True, routed: bool = False) -> Layout:
    def store(matrix: np.ndarray) -> Stored:
        codes, scales, zeros, numbers = _rounded(matrix, group or matrix.shape[1], symmetric)
        tensors = {
            "weight_packed": words(codes, 1),
            "weight_scale": scales,
            "weight_shape": np.array(matrix.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros, 0)
        return Stored(tensors, numbers)

    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None,
               "strategy": "group" if group else "channel", "group_size": group}  # fmt: skip
    name = f"pack-quantized-{group or 'channel'}{'' if symmetric else '-zeros'}{'-kimi' if routed else ''}"
    ignore = ["lm_head"]
    if routed:
        ignore += ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    return Layout(name, store, _compressed("pack-quantized", weights, ignore), ROUTED if routed else MATRICES)


def _compressed(format: str, weights: dict[str, Any], ignore: list[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "ignore": ignore,
            "config_groups": {"group_0": group}, "quantization_status": "compressed"}  # fmt: skip


def quark(reordered: bool, signed: bool) -> Layout:
    order = AWQ_ORDER if reordered else STRAIGHT

    def store(matrix: np.ndarray) -> Stored:
        codes, scales, zeros, numbers = _rounded(matrix, GROUP, signed)
        stored = codes - 8 if signed else codes
        tensors = {"weight": words(stored.T, 1, order), "weight_scale": scales.T}
        tensors["weight_zero_point"] = words((0 * zeros if signed else zeros).T, 1, order)
        return Stored(tensors, numbers)

    weight = {"dtype": "int4" if signed else "uint4", "qscheme": "per_group", "group_size": GROUP,
              "ch_axis": 1, "symmetric": signed, "is_dynamic": False, "scale_type": "float"}  # fmt: skip
    config = _quark(weight, None) | {"export": {"pack_method": "reorder" if reordered else "order"}}
    return Layout(f"quark-{weight['dtype']}{'' if reordered else '-order'}", store, config)


def _quark(weight: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    both = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": both, "exclude": ["lm_head"],
            "layer_quant_config": {}, "layer_type_quant_config": {}}  # fmt: skip


def mxfp4(library: str) -> Layout:
    codes_name = "weight" if library == "quark" else "weight_packed"

    def store(matrix: np.ndarray) -> Stored:
        outputs, inputs = matrix.shape
        groups = matrix.reshape(outputs, -1, 32)
        exponents = np.floor(np.log2(np.abs(groups).max(2))).astype(int) - 2
        powers = (2.0 ** exponents[..., None]).astype(np.float32)
        codes = np.abs(groups[..., None] / powers[..., None] - E2M1).argmin(-1)
        pairs = codes.reshape(outputs, -1)
        packed = (pairs[:, 0::2] | (pairs[:, 1::2] << 4)).astype(np.uint8)
        tensors = {codes_name: packed, "weight_scale": (exponents + 127).astype(np.uint8)}
        return Stored(tensors, (E2M1[codes] * powers).reshape(outputs, inputs))

    if library == "quark":
        weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0",
                  "is_dynamic": False}  # fmt: skip
        return Layout("quark-mxfp4", store, _quark(weight, weight | {"is_dynamic": True}))
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return Layout("mxfp4-pack-quantized", store, _compressed("mxfp4-pack-quantized", weights, ["lm_head"]))


def save_four_bits(model: Tiny, layout: Layout, directory: Path) -> torch.nn.Module:
    """Save the model in that layout; returns transformers' model of the dequantized numbers, float32."""
    save_tiny(model, directory)
    path = directory / "model.safetensors"
    plain = load_file(path)
    stored: dict[str, torch.Tensor] = {}
    for name in list(plain):
        if not layout.matrices.search(name):
            stored[name] = plain[name]
            continue
        made = layout.store(plain[name].numpy())
        module = name.removesuffix(".weight")
        stored |= {
            f"{module}.{last}": torch.from_numpy(np.ascontiguousarray(array))
            for last, array in made.tensors.items()
        }
        plain[name] = torch.from_numpy(np.ascontiguousarray(made.numbers, np.float32))
    save_file(plain, path, metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    reference.config._experts_implementation = "eager"
    save_file(stored, path, metadata={"format": "pt"})
    settings = directory / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"quantization_config": layout.config}))
    return reference
