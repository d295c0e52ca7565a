"""The method quark, AMD's: one config for all layers, others for layers by glob, and exclusions.

A config has one part for weights and one for inputs; null leaves the layer, or its inputs, as they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

from workers.layers.quantization import int4
from workers.layers.quantization.channel_fp8 import channel_fp8, tensor_fp8
from workers.layers.quantization.int8 import channel_int8
from workers.layers.quantization.mxfp4 import mxfp4
from workers.layers.quantization.rules import Rule, Rules, exact, excluded, glob, one_of, section
from workers.layers.quantization.scheme import PLAIN, Scheme

_PARTS = ("output_tensors", "bias")


def rules(stated: Mapping[str, Any]) -> Rules:
    """Exclusions, then layer_quant_config in its order, then the global config."""
    if section(stated, "layer_type_quant_config"):
        raise ValueError("a layer_type_quant_config")
    packing = section(stated, "export")
    layers = section(stated, "layer_quant_config")
    named = (Rule(pattern, _scheme(section(layers, pattern), packing, pattern), glob) for pattern in layers)
    default = _scheme(section(stated, "global_quant_config"), packing, "global_quant_config")
    return Rules(default, (*excluded(stated, ("exclude",), exact, forms=True), *named))


def _scheme(config: Mapping[str, Any], packing: Mapping[str, Any], name: str) -> Scheme:
    """The scheme of one config; `packing` is the export section."""
    weight = section(config, "weight")
    inputs = section(config, "input_tensors")
    for part in _PARTS:
        if section(config, part) and not name.endswith(_CACHED):
            raise ValueError(f"{part} in {name}")
    if not weight:
        if inputs:
            raise ValueError(f"input_tensors and no weight in {name}")
        return PLAIN
    dtype = weight.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"weights of dtype {dtype!r:.40} in {name}; supported: {', '.join(DTYPES)}")
    try:
        return DTYPES[dtype](weight, inputs, packing)
    except ValueError as error:
        raise ValueError(f"{error}, in {name}") from None


_CACHED = ("k_proj", "v_proj", "kv_b_proj", "qkv_proj")
"""Projections whose quantized outputs are the KV cache's."""


def _fp8(weight: Mapping[str, Any], inputs: Mapping[str, Any], packing: Mapping[str, Any]) -> Scheme:
    scheme = one_of(weight, "qscheme", ("per_tensor", "per_channel"), None)
    _require(weight)
    static = _static(inputs, "fp8_e4m3")
    if scheme == "per_channel":
        one_of(weight, "ch_axis", (0,), 0)
        if static:
            raise ValueError("static inputs for weights per channel; supported: per tensor")
        return channel_fp8()
    if scheme == "per_tensor":
        return tensor_fp8(static)
    raise ValueError("weights without a qscheme")


def _int8(weight: Mapping[str, Any], inputs: Mapping[str, Any], packing: Mapping[str, Any]) -> Scheme:
    scheme = one_of(weight, "qscheme", ("per_tensor", "per_channel"), None)
    if scheme is None:
        raise ValueError("weights without a qscheme")
    _require(weight)
    one_of(weight, "ch_axis", (0,), 0)
    return channel_int8(scheme == "per_tensor", _static(inputs, "int8"))


def _int4(weight: Mapping[str, Any], inputs: Mapping[str, Any], packing: Mapping[str, Any]) -> Scheme:
    """int4 is symmetric; uint4 has zero points."""
    one_of(weight, "is_dynamic", (False,), False)
    signed = weight["dtype"] == "int4"
    one_of(weight, "symmetric", (signed,), signed)
    one_of(weight, "scale_type", ("float",), "float")
    one_of(weight, "scale_format", ("float32",), "float32")
    if inputs:
        raise ValueError("input_tensors for weights of 4 bits; supported: none")
    if one_of(weight, "qscheme", ("per_group",), None) is None:
        raise ValueError("weights without a qscheme")
    one_of(weight, "ch_axis", (-1, 1), -1)
    group = int4.group_of(weight.get("group_size"))
    reordered = one_of(packing, "pack_method", ("reorder", "order"), "reorder") == "reorder"
    return int4.quark(group, reordered, signed)


def _mxfp4(weight: Mapping[str, Any], inputs: Mapping[str, Any], packing: Mapping[str, Any]) -> Scheme:
    """Inputs may be rounded to 4 bits, by their own ranges; they are not."""
    one_of(weight, "is_dynamic", (False,), False)
    for part in filter(None, (weight, inputs)):
        one_of(part, "dtype", ("fp4",), None)
        one_of(part, "qscheme", ("per_group",), "per_group")
        one_of(part, "group_size", (32,), None)
        one_of(part, "scale_format", ("e8m0",), None)
        if None in (part.get("group_size"), part.get("scale_format")):
            raise ValueError("4-bit floats without group_size 32 and scale_format e8m0")
    if inputs:
        one_of(inputs, "is_dynamic", (True,), True)
    return mxfp4("weight")


DTYPES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], Scheme]] = {
    "fp4": _mxfp4,
    "fp8_e4m3": _fp8,
    "int4": _int4,
    "int8": _int8,
    "uint4": _int4,
}
"""dtype of weights -> the scheme, of `weight`, `input_tensors` and `export`."""


def _require(weight: Mapping[str, Any]) -> None:
    one_of(weight, "is_dynamic", (False,), False)
    one_of(weight, "symmetric", (True,), True)


def _static(inputs: Mapping[str, Any], dtype: str) -> bool:
    """Whether the inputs have a scale in the checkpoint. Raises ValueError for inputs of another kind."""
    if not inputs:
        return False
    if inputs.get("dtype") != dtype:
        raise ValueError(f"input_tensors of dtype {inputs.get('dtype')!r:.40}; supported: {dtype}")
    one_of(inputs, "symmetric", (True,), True)
    return not one_of(inputs, "is_dynamic", (True, False), True)
