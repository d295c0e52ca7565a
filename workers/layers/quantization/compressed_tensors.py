"""The method compressed-tensors: groups of modules, each with a scheme and perhaps a format of its own.

A target is a path, a regular expression after re:, or the class Linear, which every quantized matrix has.
Paths and expressions go before the class, and `ignore` before both.
"""

from collections.abc import Callable, Mapping
from typing import Any

from workers.layers.quantization import int4, nvfp4
from workers.layers.quantization.block_fp8 import block_fp8, block_of
from workers.layers.quantization.channel_fp8 import channel_fp8, tensor_fp8
from workers.layers.quantization.int8 import channel_int8
from workers.layers.quantization.mxfp4 import mxfp4
from workers.layers.quantization.rules import (
    REGEX,
    Match,
    Rule,
    Rules,
    always,
    exact,
    one_of,
    patterns,
    regex,
    section,
)
from workers.layers.quantization.scheme import PLAIN, Scheme

_CLASS = "Linear"
_MIXED = "mixed-precision"
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")


def rules(stated: Mapping[str, Any]) -> Rules:
    """One rule for each target of each group."""
    _refuse_transforms(stated)
    groups = section(stated, "config_groups")
    if not groups:
        raise ValueError("no config_groups")
    named: list[Rule] = []
    by_class: list[Rule] = []
    schemes: dict[str, Scheme] = {}
    for name in groups:
        group = section(groups, name)
        scheme = _scheme(group, group.get("format") or stated.get("format"), name)
        for target in _targets(group, name):
            if schemes.setdefault(target, scheme) is not scheme:
                raise ValueError(
                    f"target {target!r:.60} in two config groups, as {schemes[target].name} and {scheme.name}"
                )
            (by_class if target == _CLASS else named).append(Rule(target, scheme, _match_of(target)))
    ignored = (Rule(pattern, PLAIN, _match_of(pattern)) for pattern in patterns(stated, "ignore"))
    return Rules(PLAIN, (*ignored, *named, *by_class))


def _match_of(pattern: str) -> Match:
    if pattern == _CLASS:
        return always
    return regex if pattern.startswith(REGEX) else exact


def _targets(group: Mapping[str, Any], name: str) -> list[str]:
    if not (found := patterns(group, "targets")):
        raise ValueError(f"no targets in config group {name}")
    return found


def _refuse_transforms(stated: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that change the numbers besides quantization."""
    sparsity = section(stated, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise ValueError(f"sparsity_config of format {sparsity['format']!r:.40}; supported: dense")
    if section(stated, "transform_config"):
        raise ValueError("a transform_config")
    one_of(stated, "quantization_status", ("compressed", "frozen"), "compressed")


def _scheme(group: Mapping[str, Any], format: Any, name: str) -> Scheme:
    """The scheme of a group; `format` is that of its tensors."""
    if not isinstance(format, str) or format == _MIXED or format not in FORMATS:
        raise ValueError(f"format {format!r:.40} of config group {name}; supported: {', '.join(FORMATS)}")
    weights = section(group, "weights")
    inputs = section(group, "input_activations")
    if not weights:
        raise ValueError(f"no weights in config group {name}")
    if section(group, "output_activations"):
        raise ValueError(f"output_activations in config group {name}")
    try:
        return FORMATS[format](weights, inputs)
    except ValueError as error:
        raise ValueError(f"{error}, in config group {name}") from None


def _float_quantized(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    _require(weights, "float", 8)
    static = _static(inputs, "float")
    strategy = one_of(weights, "strategy", ("tensor", "channel", "block"), None)
    if static and strategy != "tensor":
        raise ValueError(f"static inputs for weights with strategy {strategy}; supported: tensor")
    if strategy == "tensor":
        return tensor_fp8(static)
    if strategy == "channel":
        return channel_fp8()
    if strategy == "block":
        return block_fp8(*block_of(weights.get("block_structure"), "block_structure"), "weight_scale")
    raise ValueError("weights without a strategy")


def _int_quantized(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    _require(weights, "int", 8)
    strategy = one_of(weights, "strategy", ("tensor", "channel"), "tensor")
    return channel_int8(strategy == "tensor", _static(inputs, "int"))


def _naive_quantized(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    return (_float_quantized if weights.get("type") == "float" else _int_quantized)(weights, inputs)


def _pack_quantized(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    one_of(weights, "type", ("int",), "int")
    one_of(weights, "num_bits", (4,), 8)
    if weights.get("num_bits") != 4:
        raise ValueError("num_bits 8; supported: 4")
    one_of(weights, "dynamic", (False,), False)
    one_of(weights, "actorder", ("weight", "static"), None)
    if inputs:
        raise ValueError(f"input_activations of {inputs.get('num_bits', 8)!r:.20} bits; supported: none")
    strategy = one_of(weights, "strategy", ("group", "channel"), None)
    if strategy is None:
        raise ValueError("weights without a strategy")
    group = int4.group_of(weights.get("group_size")) if strategy == "group" else None
    return int4.compressed_tensors(group, not one_of(weights, "symmetric", (True, False), True))


def _mxfp4(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    """Inputs may be rounded to 4 bits, by their own ranges; they are not."""
    for part in filter(None, (weights, inputs)):
        one_of(part, "type", ("float",), None)
        one_of(part, "num_bits", (4,), None)
        one_of(part, "group_size", (32,), 32)
    if "dynamic" in inputs:
        one_of(inputs, "dynamic", (True,), True)
    return mxfp4("weight_packed")


def _nvfp4(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    """Inputs may be rounded to 4 bits; they are not."""
    for part in filter(None, (weights, inputs)):
        one_of(part, "type", ("float",), None)
        one_of(part, "num_bits", (4,), None)
        one_of(part, "group_size", (nvfp4.GROUP,), nvfp4.GROUP)
    return nvfp4.compressed_tensors()


FORMATS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Scheme]] = {
    "float-quantized": _float_quantized,
    "int-quantized": _int_quantized,
    "mxfp4-pack-quantized": _mxfp4,
    "naive-quantized": _naive_quantized,
    "nvfp4-pack-quantized": _nvfp4,
    "pack-quantized": _pack_quantized,
}
"""Format of a group's tensors -> the scheme, of its `weights` and `input_activations`."""


def _require(weights: Mapping[str, Any], type: str, bits: int) -> None:
    """Raise ValueError unless the weights are symmetric and of that kind."""
    one_of(weights, "type", (type,), "int" if type == "int" else None)
    if weights.get("type", "int") != type:
        raise ValueError(f"weights of type int; supported for this format: {type}")
    one_of(weights, "num_bits", (bits,), bits)
    one_of(weights, "symmetric", (True,), True)
    one_of(weights, "dynamic", (False,), False)


def _static(inputs: Mapping[str, Any], type: str) -> bool:
    """Whether the inputs have a scale in the checkpoint. Raises ValueError for inputs of another kind."""
    if not inputs:
        return False
    found = (inputs.get("type", "int"), inputs.get("num_bits", 8))
    if found != (type, 8):
        raise ValueError(f"input_activations of type and bits {found!r:.40}; supported: {(type, 8)}")
    one_of(inputs, "symmetric", (True,), True)
    one_of(inputs, "strategy", _STRATEGIES, None)
    return one_of(inputs, "dynamic", (True, False, "local"), False) is False
