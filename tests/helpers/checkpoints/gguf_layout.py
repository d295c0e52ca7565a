"""Weights of transformers' models under llama.cpp's names, in the forms that its converter writes."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def in_file(weights: Mapping[str, np.ndarray], kind: str, config: Any) -> Arrays:
    """By the names in the file; those that llama.cpp stores as they are keep theirs."""
    found: Arrays = {}
    for name, array in weights.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        block = f"blk.{layer[1]}." if layer else ""
        if ".experts." in name:
            found |= _experts(block, name, array, kind)
        elif name.endswith("kv_b_proj.weight"):
            found |= _latent_up(block, array, config)
        elif ".linear_attn." in name:
            found |= _linear_attention(block, name, array, kind, config)
        elif ".forget_gate." in name or name.endswith("self_attn.conv1d.weight"):
            found |= _kimi_delta(block, name, array)
        elif name.endswith("e_score_correction_bias"):
            found[f"{block}exp_probs_b.bias"] = array
        elif name.endswith("sinks"):
            found[f"{block}attn_sinks.weight"] = array
        else:
            adds_one = kind in ("qwen3next", "qwen35", "qwen35moe") and name.endswith("norm.weight")
            found[name] = array + np.float32(1) if adds_one else array
    return found


def _experts(block: str, name: str, array: np.ndarray, kind: str) -> Arrays:
    suffix = "bias" if name.endswith("bias") else "weight"
    if kind in ("gpt-oss", "llama4") and suffix == "weight":
        array = array.transpose(0, 2, 1)
    if "down_proj" in name:
        return {f"{block}ffn_down_exps.{suffix}": array}
    half = array.shape[1] // 2
    gate, up = (array[:, ::2], array[:, 1::2]) if kind == "gpt-oss" else (array[:, :half], array[:, half:])
    return {f"{block}ffn_gate_exps.{suffix}": gate, f"{block}ffn_up_exps.{suffix}": up}


def _latent_up(block: str, array: np.ndarray, config: Any) -> Arrays:
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    heads = array.reshape(config.num_attention_heads, nope + value, -1)
    return {
        f"{block}attn_k_b.weight": np.stack([head[:nope].T for head in heads]),
        f"{block}attn_v_b.weight": np.stack([head[nope:] for head in heads]),
    }


def _kimi_delta(block: str, name: str, array: np.ndarray) -> Arrays:
    match name.rpartition("self_attn.")[2].removeprefix("forget_gate."):
        case "conv1d.weight":
            each = np.split(array[None, :, 0, None], 3, 1)  # [1, features, 1, taps]
            return {f"{block}ssm_conv1d_{of}.weight": part for of, part in zip("qkv", each, strict=True)}
        case "A_log":
            return {f"{block}ssm_a": -np.exp(array)}
        case "dt_bias":
            return {f"{block}ssm_dt.bias": array}
        case last:
            return {f"{block}ssm_{last.removesuffix('_proj.weight')}.weight": array}


def _linear_attention(block: str, name: str, array: np.ndarray, kind: str, config: Any) -> Arrays:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
    last = name.rpartition("linear_attn.")[2]
    # Qwen3.5: value heads in tiles, the first of each key head, then the second.
    tiled = [key * (values // keys) + tile for tile in range(values // keys) for key in range(keys)]
    order = np.array(tiled if kind.startswith("qwen35") else range(values))
    features = (order[:, None] * value_width + np.arange(value_width)).reshape(-1)
    before = np.arange(2 * keys * width)
    with_values = np.concatenate((before, len(before) + features))
    match last:
        case "A_log":
            return {f"{block}ssm_a": -np.exp(array[order])}
        case "dt_bias":
            return {f"{block}ssm_dt.bias": array[order]}
        case "conv1d.weight":
            return {f"{block}ssm_conv1d.weight": array[:, 0][with_values]}
        case "norm.weight":
            return {f"{block}ssm_norm.weight": array}
        case "out_proj.weight":
            return {f"{block}ssm_out.weight": array[:, features]}
        case "in_proj_ba.weight":
            return {f"{block}ssm_ba.weight": array}
        case "in_proj_a.weight" | "in_proj_b.weight":
            stored = "ssm_alpha" if last == "in_proj_a.weight" else "ssm_beta"
            return {f"{block}{stored}.weight": array[order]}
        case "in_proj_qkv.weight":
            return {f"{block}attn_qkv.weight": array[with_values]}
        case "in_proj_z.weight":
            return {f"{block}attn_gate.weight": array[features]}
    assert last == "in_proj_qkvz.weight"
    of_values = values // keys * value_width
    heads = array.reshape(keys, 2 * width + 2 * of_values, -1)
    kinds = np.split(heads, (width, 2 * width, 2 * width + of_values), 1)
    query, key, value, z = (kind.reshape(-1, array.shape[1]) for kind in kinds)
    return {
        f"{block}attn_qkv.weight": np.concatenate((query, key, value)),
        f"{block}attn_gate.weight": z,
    }
