"""The 4-bit layouts of AWQ, GPTQ, compressed-tensors and Quark, packed by numpy alone.

A row is one of them, as in `tests.helpers.checkpoints.quantized_formats`.
"""

from typing import Any

import numpy as np
import torch

from tests.helpers.checkpoints.quantized_formats import Stored, StoredFormat
from tests.helpers.checkpoints.tiny_models import Tiny, tiny

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
STRAIGHT = tuple(range(8))
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
Array = np.ndarray[Any, Any]

_HEADS = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
FOUR_BIT_MODELS = [
    # On two ranks 192 features are 3 and 3 groups of 32, or 2 and 1 of 64.
    Tiny("llama", "llama", 8, _HEADS | {"intermediate_size": 192, "num_hidden_layers": 2}),
    Tiny("qwen3-moe", "qwen3_moe", 3,
         _HEADS | _EXPERTS | {"intermediate_size": 128, "num_experts": 4, "mlp_only_layers": [],
                              "num_hidden_layers": 1}),
    Tiny("deepseek-v3", "deepseek_v3", 1,
         _EXPERTS | {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4,
                     "num_key_value_heads": 4, "head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 64,
                     "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
                     "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                     "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_hidden_layers": 2}),
    Tiny("gpt-oss", "gpt_oss", 2,
         tiny("gpt-oss").config | _HEADS | {"num_hidden_layers": 1}),
]  # fmt: skip


def words(numbers: Array, axis: int, order: tuple[int, ...] = STRAIGHT) -> Array:
    """Eight numbers along `axis` in a word; nibble i has number order[i]."""
    moved = np.moveaxis(numbers.astype(np.uint32) & 15, axis, -1)
    packed = np.zeros((*moved.shape[:-1], moved.shape[-1] // 8), np.uint32)
    for nibble, number in enumerate(order):
        packed |= moved[..., number::8] << np.uint32(4 * nibble)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def _rounded(matrix: Array, groups: Array, symmetric: bool) -> tuple[Array, Array, Array, Array]:
    """Codes [O, I], scales and zero points [O, G], and the numbers; `groups` has the group of each input."""
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


def _in_order(matrix: Array, group: int | None) -> Array:
    return np.arange(matrix.shape[1]) // (group or matrix.shape[1])


def _stored(tensors: dict[str, Array], values: Array) -> Stored:
    made = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}
    return made, torch.from_numpy(np.ascontiguousarray(values, np.float32))


def _scheme(group: int | None) -> str:
    return f"INT4 with a scale for each {f'{group} inputs' if group else 'output'}"


def awq(group: int) -> StoredFormat:
    def store(matrix: torch.Tensor) -> Stored:
        codes, scales, zeros, numbers = _rounded(matrix.numpy(), _in_order(matrix.numpy(), group), False)
        packed = {"qweight": words(codes.T, 1, AWQ_ORDER), "qzeros": words(zeros.T, 1, AWQ_ORDER)}
        return _stored(packed | {"scales": scales.T}, numbers)

    config = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return StoredFormat(
        f"awq, {group}", "awq", _scheme(group), store, config, "modules_to_not_convert", "mlp.experts"
    )


def gptq(
    group: int | None, act_order: bool = False, v2: bool = False, symmetric: bool = True
) -> StoredFormat:
    def store(matrix: torch.Tensor) -> Stored:
        inputs = matrix.shape[1]
        # Matrices with the same inputs have the same order, as q, k and v.
        order = np.random.default_rng(inputs).permutation(inputs) if act_order else np.arange(inputs)
        groups = order // (group or inputs)
        codes, scales, zeros, numbers = _rounded(matrix.numpy(), groups, symmetric)
        tensors = {
            "qweight": words(codes.T, 0),
            "qzeros": words((zeros if v2 else zeros - 1).T, 1),
            "scales": scales.T,
            "g_idx": groups.astype(np.int32),
        }
        return _stored(tensors, numbers)

    config = {"bits": 4, "group_size": group or -1, "desc_act": act_order, "sym": symmetric, "lm_head": False,
              "checkpoint_format": "gptq_v2" if v2 else "gptq"}  # fmt: skip
    options = [str(group or "channel"), *["desc_act"] * act_order, *["v2"] * v2, *["zeros"] * (not symmetric)]
    return StoredFormat(
        f"gptq, {', '.join(options)}", "gptq", _scheme(group), store, config, "modules_to_not_convert",
        "mlp.experts",
    )  # fmt: skip


def compressed(group: int | None, symmetric: bool = True) -> StoredFormat:
    def store(matrix: torch.Tensor) -> Stored:
        codes, scales, zeros, numbers = _rounded(matrix.numpy(), _in_order(matrix.numpy(), group), symmetric)
        tensors = {"weight_packed": words(codes, 1), "weight_scale": scales}
        tensors["weight_shape"] = np.array(matrix.shape)
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros, 0)
        return _stored(tensors, numbers)

    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None,
               "strategy": "group" if group else "channel", "group_size": group}  # fmt: skip
    name = f"pack-quantized, {group or 'channel'}{'' if symmetric else ', zeros'}"
    config = _compressed("pack-quantized", weights)
    return StoredFormat(name, "compressed-tensors", _scheme(group), store, config, "ignore")


def _compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"format": format, "config_groups": {"group_0": group}, "quantization_status": "compressed"}


def quark(reordered: bool, signed: bool) -> StoredFormat:
    order = AWQ_ORDER if reordered else STRAIGHT

    def store(matrix: torch.Tensor) -> Stored:
        codes, scales, zeros, numbers = _rounded(matrix.numpy(), _in_order(matrix.numpy(), 32), signed)
        tensors = {"weight": words((codes - 8 if signed else codes).T, 1, order), "weight_scale": scales.T}
        tensors["weight_zero_point"] = words((0 * zeros if signed else zeros).T, 1, order)
        return _stored(tensors, numbers)

    dtype = "int4" if signed else "uint4"
    weight = {"dtype": dtype, "qscheme": "per_group", "group_size": 32, "ch_axis": 1, "symmetric": signed,
              "is_dynamic": False, "scale_type": "float"}  # fmt: skip
    config = _quark(weight, None) | {"export": {"pack_method": "reorder" if reordered else "order"}}
    name = f"quark {dtype}, {'reorder' if reordered else 'order'}"
    return StoredFormat(name, "quark", _scheme(32), store, config, "exclude")


def _quark(weight: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    both = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {"global_quant_config": both, "layer_quant_config": {}, "layer_type_quant_config": {}}


def mxfp4(method: str) -> StoredFormat:
    codes_name = "weight" if method == "quark" else "weight_packed"

    def store(matrix: torch.Tensor) -> Stored:
        outputs, inputs = matrix.shape
        groups = matrix.numpy().reshape(outputs, -1, 32)
        exponents = np.floor(np.log2(np.abs(groups).max(2))).astype(int) - 2
        powers = (2.0 ** exponents[..., None]).astype(np.float32)
        codes = np.abs(groups[..., None] / powers[..., None] - E2M1).argmin(-1)
        pairs = codes.reshape(outputs, -1)
        packed = (pairs[:, 0::2] | (pairs[:, 1::2] << 4)).astype(np.uint8)
        tensors = {codes_name: packed, "weight_scale": (exponents + 127).astype(np.uint8)}
        return _stored(tensors, (E2M1[codes] * powers).reshape(outputs, inputs))

    if method == "quark":
        weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0",
                  "is_dynamic": False}  # fmt: skip
        return StoredFormat("quark mxfp4", method, "MXFP4", store,
                            _quark(weight, weight | {"is_dynamic": True}), "exclude")  # fmt: skip
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    config = _compressed("mxfp4-pack-quantized", weights)
    return StoredFormat("mxfp4-pack-quantized", method, "MXFP4", store, config, "ignore")


def nvfp4(method: str) -> StoredFormat:
    """compressed-tensors divides by the number of the matrix that modelopt multiplies by."""
    divides = method == "compressed-tensors"
    codes_name, factor_name = ("weight", "weight_scale_2")
    if divides:
        codes_name, factor_name = ("weight_packed", "weight_global_scale")

    def store(matrix: torch.Tensor) -> Stored:
        outputs, inputs = matrix.shape
        groups = matrix.unflatten(1, (-1, 16))
        factor = matrix.abs().max() / (6 * 448)
        scales = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
        units = scales.float() * factor
        codes = (groups[..., None] / units[..., None, None] - torch.from_numpy(E2M1)).abs().argmin(-1)
        pairs = codes.reshape(outputs, -1)
        tensors = {
            codes_name: (pairs[:, 0::2] | (pairs[:, 1::2] << 4)).to(torch.uint8),
            "weight_scale": scales,
            factor_name: factor.reciprocal().reshape(1) if divides else factor,
            "input_global_scale" if divides else "input_scale": torch.ones(()),
        }
        return tensors, (torch.from_numpy(E2M1)[codes] * units[..., None]).reshape(outputs, inputs)

    if divides:
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
                   "group_size": 16}  # fmt: skip
        config = _compressed("nvfp4-pack-quantized", weights)
        inputs_ = weights | {"dynamic": "local"}
        config["config_groups"]["group_0"]["input_activations"] = inputs_
        return StoredFormat("nvfp4-pack-quantized", method, "NVFP4", store, config, "ignore")
    config = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
    return StoredFormat("modelopt NVFP4", method, "NVFP4", store, config, "exclude_modules")


FOUR_BIT_FORMATS = [
    awq(32),
    awq(64),
    gptq(32, v2=True),
    gptq(64, symmetric=False),
    gptq(32, act_order=True),
    gptq(None, act_order=True, v2=True),
    compressed(32),
    compressed(64, symmetric=False),
    compressed(None, symmetric=False),
    quark(reordered=True, signed=True),
    quark(reordered=False, signed=False),
    mxfp4("compressed-tensors"),
    mxfp4("quark"),
    nvfp4("compressed-tensors"),
    nvfp4("modelopt"),
]
