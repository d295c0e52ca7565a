"""Which scheme each layer has, by the quantization_config of published checkpoints; and configs that lie."""

import random
import re
import time
from typing import Any

import pytest

from workers.layers.quantization.channel_fp8 import channel_fp8
from workers.layers.quantization.config import QuantizationConfig, resolve
from workers.layers.quantization.rules import (
    Rule,
    Rules,
    Siblings,
    as_written,
    exact,
    glob,
    inside,
    part,
    regex,
    substring,
)
from workers.layers.quantization.scheme import PLAIN

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LAYER = "model.layers.3"
EXPERT = ("0.gate_proj", "0.up_proj", "0.down_proj")
PLAIN_NAME = "plain"
FP8_BLOCK, FP8_CHANNEL = "FP8 in blocks of 128 x 128", "FP8 per channel"
FP8_TENSOR, FP8_STATIC = "FP8 per tensor", "FP8 per tensor with static inputs"

Settings = dict[str, Any]


def config_of(stated: Settings) -> QuantizationConfig:
    return resolve({"model_type": "llama", "quantization_config": stated}, PACKED)


def group(strategy: str, inputs: Settings | None = None, type: str = "float", **settings: Any) -> Settings:
    weights = {"num_bits": 8, "type": type, "symmetric": True, "strategy": strategy, "dynamic": False}
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs} | settings


def dynamic(type: str = "float") -> Settings:
    return {"num_bits": 8, "type": type, "symmetric": True, "strategy": "token", "dynamic": True}


STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def compressed(format: str, *groups: Settings, **settings: Any) -> Settings:
    named = {f"group_{number}": each for number, each in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": named, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": 1.5,
    } | settings  # fmt: skip


def quark(weight: Settings | None, inputs: Settings | None = None, **settings: Any) -> Settings:
    both = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": both, "exclude": ["lm_head"],
            "layer_quant_config": {}, "layer_type_quant_config": {}} | settings  # fmt: skip


QUARK_TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": None}
QUARK_CHANNEL = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": False, "ch_axis": 0}

FP8 = {"quant_method": "fp8"}
FBGEMM = {"quant_method": "fbgemm_fp8"}
MODELOPT = {"quant_method": "modelopt"}
FOUND: list[tuple[str, Settings, str]] = [
    ("deepseek", FP8 | {"weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic",
                        "scale_fmt": "ue8m0"}, FP8_BLOCK),
    ("fp8-tensor", FP8 | {"activation_scheme": "dynamic", "weight_block_size": None}, FP8_TENSOR),
    ("fp8-static", FP8 | {"activation_scheme": "static"}, FP8_STATIC),
    ("fbgemm", FBGEMM | {"activation_scale_ub": 1200.0}, "FP8 per channel, inputs up to 1200"),
    ("ct-channel", compressed("float-quantized", group("channel", dynamic())), FP8_CHANNEL),
    ("ct-tensor", compressed("float-quantized", group("tensor", STATIC)), FP8_STATIC),
    ("ct-block", compressed("float-quantized", group("block", dynamic(), block_structure=None) | {
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}),
     FP8_BLOCK),
    ("ct-weights-alone", compressed("naive-quantized", group("channel")), FP8_CHANNEL),
    ("ct-int8", compressed("int-quantized", group("channel", dynamic("int"), "int")), "INT8 per channel"),
    ("ct-int8-static", compressed("int-quantized", group("channel", STATIC | {"type": "int"}, "int")),
     "INT8 per channel"),
    ("ct-mixed", compressed("mixed-precision", group("channel", format="float-quantized")), FP8_CHANNEL),
    ("quark-tensor", quark(QUARK_TENSOR, QUARK_TENSOR | {"is_dynamic": False}), FP8_STATIC),
    ("quark-dynamic", quark(QUARK_TENSOR, QUARK_TENSOR | {"is_dynamic": True}), FP8_TENSOR),
    ("quark-ptpc", quark(QUARK_CHANNEL, QUARK_CHANNEL | {"is_dynamic": True, "ch_axis": 1}), FP8_CHANNEL),
    ("quark-int8", quark(QUARK_CHANNEL | {"dtype": "int8"}), "INT8 per channel"),
    ("modelopt", MODELOPT | {"quant_algo": "FP8", "ignore": ["lm_head"]}, FP8_STATIC),
    ("modelopt-blocks", MODELOPT | {"quant_algo": "fp8_pb_wo"}, FP8_BLOCK),
    ("modelopt-channel", MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, FP8_CHANNEL),
    ("modelopt-cache-alone", MODELOPT | {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, PLAIN_NAME),
    ("hf_quant_config", MODELOPT | {"quantization": {"quant_algo": "FP8", "exclude_modules": []}},
     FP8_STATIC),
]  # fmt: skip


@pytest.mark.parametrize(("stated", "scheme"), [row[1:] for row in FOUND], ids=[row[0] for row in FOUND])
def test_the_scheme_of_linear_layers_and_experts(stated: Settings, scheme: str) -> None:
    found = config_of(stated)
    for path in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        assert found.linear(f"{LAYER}.{path}").name == scheme
    assert found.experts(f"{LAYER}.mlp.experts", EXPERT, 4)[0].name == scheme
    assert found.linear(f"{LAYER}.mlp.down_proj") is config_of(stated).linear(f"{LAYER}.mlp.down_proj")


CT = compressed("float-quantized", group("channel", dynamic()))
ALL = MODELOPT | {"quant_algo": "FP8"}
MATCHED: list[tuple[str, Settings, str, bool]] = [
    ("none excluded", FP8, "mlp.down_proj", False),
    ("a path", FP8 | {"modules_to_not_convert": [f"{LAYER}.mlp.down_proj"]}, "mlp.down_proj", True),
    ("a module around it", FP8 | {"ignored_layers": [f"{LAYER}.mlp"]}, "mlp.gate_up_proj", True),
    ("a fused name", FP8 | {"ignored_layers": [f"{LAYER}.self_attn.qkv_proj"]}, "self_attn.qkv_proj", True),
    ("no part of a name", FP8 | {"ignored_layers": [f"{LAYER}.mlp.down"]}, "mlp.down_proj", False),
    ("regex from the start", CT | {"ignore": ["re:.*down_proj"]}, "mlp.down_proj", True),
    ("regex not searched", CT | {"ignore": ["re:down_proj"]}, "mlp.down_proj", False),
    ("regex needs no end", CT | {"ignore": ["re:model.layers.3"]}, "mlp.down_proj", True),
    ("an exact path", CT | {"ignore": [f"{LAYER}.mlp"]}, "mlp.down_proj", False),
    ("a class", CT | {"ignore": ["Linear"]}, "mlp.down_proj", True),
    ("quark: exact", quark(QUARK_CHANNEL, exclude=["mlp.down_proj"]), "mlp.down_proj", False),
    ("quark: regex", quark(QUARK_CHANNEL, exclude=["re:.*down_proj$"]), "mlp.down_proj", True),
    ("quark: glob", quark(QUARK_CHANNEL, exclude=["*down_proj"]), "mlp.down_proj", True),
    ("modelopt: glob", ALL | {"ignore": ["model.layers.3*"]}, "mlp.down_proj", True),
    ("modelopt: a part", ALL | {"exclude_modules": ["3.mlp.down"]}, "mlp.down_proj", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("stated", "path", "plain"), [row[1:] for row in MATCHED], ids=[row[0] for row in MATCHED]
)
def test_exclusions_match_as_the_method_matches(stated: Settings, path: str, plain: bool) -> None:
    assert (config_of(stated).linear(f"{LAYER}.{path}") is PLAIN) == plain


def names(stated: Settings) -> list[str]:
    """Schemes of four modules."""
    found = config_of(stated)
    paths = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    return [found.linear(f"{LAYER}.{path}").name for path in paths]


def test_layers_may_have_different_schemes() -> None:
    attention = group("channel", dynamic(), format="float-quantized", targets=["re:.*self_attn.*"])
    down = group("channel", dynamic("int"), "int", format="int-quantized", targets=[f"{LAYER}.mlp.down_proj"])
    rest = group("tensor", STATIC, format="float-quantized")
    mixed = compressed("mixed-precision", rest, attention, down)
    assert names(mixed) == [FP8_CHANNEL, FP8_CHANNEL, FP8_STATIC, "INT8 per channel"]
    layers = {
        "*self_attn*": {"weight": None},
        "*mlp.down_proj": {"weight": QUARK_TENSOR, "input_tensors": None},
    }
    assert names(quark(QUARK_CHANNEL, layer_quant_config=layers)) == [
        PLAIN_NAME, PLAIN_NAME, FP8_CHANNEL, FP8_TENSOR,
    ]  # fmt: skip
    both = {"*": {"weight": QUARK_TENSOR}, "*down_proj": {"weight": None}}
    assert names(quark(QUARK_CHANNEL, layer_quant_config=both)) == [FP8_TENSOR] * 4  # the first applies
    listed = {f"{LAYER}.self_attn.{name}_proj": {"quant_algo": "FP8"} for name in "qkvo"}
    found = names(MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed})
    assert found == [FP8_STATIC, FP8_STATIC, PLAIN_NAME, PLAIN_NAME]


def test_every_expert_may_be_excluded_one_by_one() -> None:
    every = [f"{LAYER}.mlp.experts.{e}.{n}_proj" for e in range(4) for n in ("gate", "up", "down")]
    found = config_of(CT | {"ignore": every})
    assert found.experts(f"{LAYER}.mlp.experts", EXPERT, 4)[0] is PLAIN
    with pytest.raises(ValueError, match=r"fused into model\.layers\.3\.mlp\.experts, .*experts\.4"):
        found.experts(f"{LAYER}.mlp.experts", EXPERT, 5)


EXPERTS = f"{LAYER}.mlp.experts"
SOME_EXPERTS: list[tuple[Settings, str]] = [
    (CT | {"ignore": [r"re:.*experts\.[2-3]\..*"]}, "2.gate_proj: plain, others: FP8 per channel"),
    (CT | {"ignore": [r"re:model\.layers\.3\.mlp\.experts\..\.down_proj"]}, "0.down_proj: plain"),
    (CT | {"ignore": ["re:.*down_proj"]}, "0.down_proj: plain"),
    (quark(QUARK_CHANNEL, exclude=["*experts.7.*"]), "7.gate_proj: plain"),
    (ALL | {"ignore": ["experts.5."]}, "5.gate_proj: plain"),
    (ALL | {"ignore": ["*.experts.?.up_proj"]}, "0.up_proj: plain"),
    (FP8 | {"ignored_layers": ["mlp.experts.7"]}, "7.gate_proj: plain"),
]  # fmt: skip


@pytest.mark.parametrize(("stated", "message"), SOME_EXPERTS)
def test_a_pattern_that_names_some_experts_is_refused(stated: Settings, message: str) -> None:
    start = f"different formats for modules that are fused into {EXPERTS}, which is not supported: {EXPERTS}."
    with pytest.raises(ValueError, match=re.escape(start + message)):
        config_of(stated).experts(EXPERTS, EXPERT, 8)


@pytest.mark.parametrize(
    "stated",
    [
        CT | {"ignore": [r"re:.*experts\.[0-7]\..*"]},
        CT | {"ignore": [r"re:.*\.\d\.(gate|up|down)_proj$"]},
        CT | {"ignore": ["re:.*experts.*"]},
        quark(QUARK_CHANNEL, exclude=["*experts.?.*"]),
        ALL | {"ignore": ["*.experts.*"]},
        FP8 | {"ignored_layers": ["mlp.experts"]},
    ],
)
def test_a_pattern_that_names_all_experts_of_a_layer_acts(stated: Settings) -> None:
    assert config_of(stated).experts(EXPERTS, EXPERT, 8)[0] is PLAIN


@pytest.mark.parametrize("seed", range(3))
def test_siblings_that_are_not_looked_at_do_not_differ(seed: int) -> None:
    """Patterns of all kinds, against a look at every child."""
    drawn = random.Random(seed)
    pieces = ("a", "3", "12", ".", ".", "x.", "*", "?", "[1-3]", "x")
    expressions = ("a", "3", r"\.", r"\d", ".", ".*", ".+", "x", "(x|3)", r"x\.")
    kinds = (exact, part, substring, glob, as_written, inside)
    for _ in range(4000):
        if drawn.random() < 0.5:
            pattern = "".join(drawn.choices(pieces, k=drawn.randint(1, 5)))
            rule = Rule(pattern, PLAIN, drawn.choice(kinds))
        else:
            rule = Rule("re:" + "".join(drawn.choices(expressions, k=drawn.randint(1, 5))), PLAIN, regex)
        path = drawn.choice(("x", "a.x", "a.3.x", "3"))
        named = {rule.names(f"{path}.{number}.{tail}") for number in (0, 3, 7, 12, 33) for tail in ("a",)}
        assert len(named) == 1 or Siblings([rule]).differ(path), (rule.pattern, path)


LISTS = {
    "exact": (CT, "ignore"),
    "parts": (FP8 | {"weight_block_size": [128, 128]}, "ignored_layers"),
    "substrings": (ALL, "ignore"),
    "around": (quark(QUARK_CHANNEL), "layer_quant_config"),
}


@pytest.mark.parametrize(("stated", "key"), LISTS.values(), ids=LISTS)
def test_a_long_list_of_modules_is_looked_up(stated: Settings, key: str) -> None:
    """256 experts of 58 layers, as tools write them: a minute if every pattern were tried for every path."""
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(58)]
    every = [f"{layer}.{e}.{n}_proj" for layer in layers for e in range(256) for n in ("gate", "up", "down")]
    listed = ["re:.*lm_head", *every]
    plain = dict.fromkeys(listed, None) if key == "layer_quant_config" else listed
    found = config_of(stated | {key: plain})
    assert all(found.experts(layer, EXPERT, 256)[0] is PLAIN for layer in layers[::8])
    assert found.linear("model.layers.0.self_attn.o_proj") is not PLAIN


def test_many_expressions_are_compiled_once() -> None:
    """More than the cache of `re` has places for."""
    dynamic = {rf"-:model\.layers\.{number}\.self_attn\..*": {} for number in range(1500)}
    found = config_of({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic})
    start = time.process_time()
    paths = [f"model.layers.{number}.{name}" for number in range(61) for name in ("self_attn.o", "mlp.down")]
    assert [found.linear(path) is PLAIN for path in paths] == [True, False] * 61
    assert time.process_time() - start < 2


NAMES = ("a", "ab", "b", "a.b", "ab.a", "b.ab", "a.b.a", "a.ba", "a*", "?b", "re:a", "re:.*b")


@pytest.mark.parametrize("seed", range(5))
def test_looking_up_equals_trying_rule_after_rule(seed: int) -> None:
    drawn = random.Random(seed)
    schemes = [channel_fp8(float(number)) for number in range(1, 9)]
    for _ in range(100):
        rules = []
        for scheme in schemes:
            pattern = drawn.choice(NAMES)
            kinds = (exact, part, substring, glob, as_written, inside)
            rules.append(Rule(pattern, scheme, regex if pattern.startswith("re:") else drawn.choice(kinds)))
        for _ in range(10):
            paths = [".".join(drawn.choices(("a", "b", "ab", "ba"), k=drawn.randint(1, 4))) for _ in "12"]
            tried = (rule.scheme for rule in rules if any(rule.names(path) for path in paths))
            assert Rules(PLAIN, rules).scheme(*paths) is next(tried, PLAIN)


GPTQ: Settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
BROKEN: list[tuple[Any, str]] = [
    (CT | {"config_groups": {"a": group("channel"), "b": group("tensor")}},
     "target 'Linear' in two config groups, as FP8 per channel and FP8 per tensor"),
    ({"quant_method": "awq", "bits": 4, "w_bit": 8}, "bits 4 and w_bit 8, which are the same setting"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format True; supported: False"),
    (FP8 | {"weight_block_size": [1 << 40, 128]}, "weight_block_size .*; supported: up to 4096"),
    ("fp8", "quantization_config is not an object: 'fp8'"),
    ({"bits": 4}, r"quantized \(unknown\): not supported"),
    ({"quant_method": ["fp8"]}, r"quantized \(\['fp8'\]\): not supported"),
    ({"quant_method": "bitsandbytes"}, r"quantized \(bitsandbytes\): not supported, use a plain checkpoint"),
    (FP8 | {"weight_block_size": [128]}, r"weight_block_size \[128\], which is not two positive numbers"),
    (FP8 | {"weight_block_size": [0, 128]}, r"weight_block_size \[0, 128\], which is not two positive"),
    (FP8 | {"weight_block_size": [128, 128], "activation_scheme": "static"}, "activation_scheme 'static'"),
    (FP8 | {"activation_scheme": "none"}, "activation_scheme 'none'; supported: dynamic, static"),
    (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'; supported: e4m3"),
    (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert that is not a list"),
    (FP8 | {"ignored_layers": ["re:("]}, "not a regular expression for modules"),
    (FBGEMM | {"activation_scale_ub": -1}, "activation_scale_ub -1, not a positive number"),
    ({"quant_method": "mxfp4"}, r"quantized \(mxfp4\): supported for model type gpt_oss"),
    (compressed("float-quantized"), "with no config_groups"),
    (CT | {"config_groups": []}, r"config_groups that is not an object: \[\]"),
    (compressed("sparse-24", group("channel")), "format 'sparse-24' of config group group_0"),
    (compressed("mixed-precision", group("channel")), "format 'mixed-precision' of config group group_0"),
    (compressed("float-quantized", group("channel", targets=[])), "no targets in config group group_0"),
    (compressed("float-quantized", group("channel", weights=None)), "no weights in config group group_0"),
    (compressed("float-quantized", group("channel", type="int")), "type 'int'; supported: float"),
    (compressed("int-quantized", group("channel")), "type 'float'; supported: int"),
    (compressed("float-quantized", group("group")), "strategy 'group'; supported: tensor, "),
    (compressed("float-quantized", group("block")), "block_structure None, which is not two positive"),
    (compressed("float-quantized", group("channel", STATIC)), "static inputs for weights with strategy"),
    (compressed("int-quantized", group("channel", STATIC | {"type": "int", "symmetric": False}, "int")),
     "symmetric False; supported: True"),
    (quark({"dtype": "int8", "qscheme": "per_channel"}, {"dtype": "int8", "symmetric": False}),
     "symmetric False; supported: True, in global_quant_config"),
    (CT | {"ignore": ["re:*"]}, "not a regular expression for modules"),
    (quark(QUARK_CHANNEL, exclude={"lm_head": True}), "exclude that is not a list of module names"),
    (quark(QUARK_CHANNEL, layer_quant_config=["*"]), "layer_quant_config that is not an object"),
    (MODELOPT | {"quant_algo": None, "kv_cache_quant_algo": None}, "quant_algo None, not the name of one"),
    (MODELOPT | {"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": "FP8"}, "quant_algo 'W4A8_AWQ'; supported"),
    (compressed("float-quantized", group("channel", dynamic("int"))), "input_activations of type .*'int', 8"),
    (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config of format 'sparse-24-b"),
    (CT | {"transform_config": {"config_groups": {}}}, "with a transform_config"),
    (quark({"dtype": "int3"}), "weights of dtype 'int3' in global_quant_config; supported: "),
    (quark({"dtype": "fp8_e4m3"}), "weights without a qscheme, in global_quant_config"),
    (quark(QUARK_CHANNEL | {"ch_axis": 1}), "ch_axis 1; supported: 0, in global_quant_config"),
    (quark(QUARK_CHANNEL, QUARK_TENSOR | {"is_dynamic": False}), "static inputs for weights per channel"),
    (quark(QUARK_TENSOR, {"dtype": "int8"}), "input_tensors of dtype 'int8'; supported: fp8_e4m3"),
    (quark(None, QUARK_TENSOR), "input_tensors and no weight in global_quant_config"),
    (quark(QUARK_TENSOR, layer_type_quant_config={"Linear": {}}), "a layer_type_quant_config"),
    (MODELOPT, "quant_algo None, not the name of one"),
    (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'; supported: FP8, "),
    (MODELOPT | {"quant_algo": "NVFP4", "group_size": 32}, "group_size 32; supported: 16"),
    (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION and no quantized_layers"),
]  # fmt: skip


@pytest.mark.parametrize(("stated", "message"), BROKEN)
def test_configs_that_lie_are_refused_in_one_line(stated: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        config_of(stated)
    assert "\n" not in str(error.value) and str(error.value).startswith("quantized")
