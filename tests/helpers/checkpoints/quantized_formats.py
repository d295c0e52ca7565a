"""Quantized formats as checkpoints store them, written here by their published layouts.

A row is one format of one quantization method; docs/use/quantization.md lists them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers.checkpoints.fp8 import FP8_MODELS, QUANTIZED, numbers, quantized
from tests.helpers.checkpoints.tiny_models import Tiny, save_tiny, tiny

Tensors = dict[str, torch.Tensor]
Stored = tuple[Tensors, torch.Tensor]
"""The tensors of a module by their names in it, and the numbers [O, I] that they stand for."""


@dataclass(frozen=True)
class StoredFormat:
    """One row."""

    name: str
    method: str
    scheme: str
    """As the server names it."""
    store: Callable[[torch.Tensor], Stored]
    """Quantizes a matrix [O, I]."""
    settings: dict[str, Any]
    """quantization_config without its exclusions."""
    exclusions: str
    """Key of the list of modules that are not quantized."""
    experts: str = "re:.*mlp.experts.*"
    """In that list: the experts of GPT-OSS, which are stacked."""
    additional: Callable[[str], Tensors] = field(default=lambda module: {})
    """More tensors of an attention module: scales of its KV cache."""

    def config(self, model_type: str) -> dict[str, Any]:
        """quantization_config, without the LM head and the experts of GPT-OSS, which are stacked."""
        excluded = ["lm_head", *([self.experts] if model_type == "gpt_oss" else [])]
        return {"quant_method": self.method} | self.settings | {self.exclusions: excluded}


def _fp8(matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (matrix / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)


def _block(scale: str, shape: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Any:
    def store(matrix: torch.Tensor) -> Stored:
        codes, scales = quantized(matrix)
        scales = scales.to(dtype)
        return {"weight": codes, scale: shape(scales)}, numbers(codes, scales.float())

    return store


def _tensor(names: tuple[str, str | None], shape: list[int], dtype: torch.dtype) -> Any:
    def store(matrix: torch.Tensor) -> Stored:
        scale = (matrix.abs().max() / 448).to(dtype)
        codes = _fp8(matrix, scale)
        tensors = {"weight": codes, names[0]: scale.reshape(shape)}
        if names[1] is not None:
            tensors[names[1]] = torch.full(shape, 0.02, dtype=dtype)
        return tensors, codes.float() * scale.float()

    return store


def _channel(shape: list[int], dtype: torch.dtype, largest: int = 448, static: bool = False) -> Any:
    def store(matrix: torch.Tensor) -> Stored:
        scales = (matrix.abs().amax(1, keepdim=True) / largest).to(dtype)
        if largest == 127:
            codes = (matrix / scales.float()).round().clamp(-128, 127).to(torch.int8)
        else:
            codes = _fp8(matrix, scales)
        tensors = {"weight": codes, "weight_scale": scales.reshape([-1, *shape])}
        if static:
            tensors["input_scale"] = torch.full([1], 0.02, dtype=dtype)
        return tensors, codes.float() * scales.float()

    return store


def _compressed(
    format: str, strategy: str, dynamic: bool, type: str = "float", **weights: Any
) -> dict[str, Any]:
    common = {"num_bits": 8, "type": type, "symmetric": True, "group_size": None, "actorder": None}
    inputs = common | {"dynamic": dynamic, "strategy": "token" if dynamic else "tensor"}
    group = {
        "targets": ["Linear"], "output_activations": None, "input_activations": inputs,
        "weights": common | {"dynamic": False, "strategy": strategy, "block_structure": None} | weights,
    }  # fmt: skip
    return {
        "format": format, "quantization_status": "compressed", "config_groups": {"group_0": group},
        "kv_cache_scheme": None, "global_compression_ratio": None, "version": "0.20.0",
        "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


def _quark(scheme: str, dtype: str, dynamic: bool) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": scheme, "is_dynamic": False, "symmetric": None, "ch_axis": 0,
              "group_size": None, "scale_type": "float", "round_method": "half_even"}  # fmt: skip
    return {
        "global_quant_config": {"weight": weight, "input_tensors": weight | {"is_dynamic": dynamic},
                                "output_tensors": None, "bias": None},
        "layer_quant_config": {}, "layer_type_quant_config": {}, "quant_mode": "eager_mode",
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }  # fmt: skip


def _scales_of_cache(key: str, value: str) -> Callable[[str], Tensors]:
    return lambda module: {f"{module}.{name}": torch.tensor(0.03) for name in (key, value)}


F32, BF16 = torch.float32, torch.bfloat16
_BLOCK, _CHANNEL = "FP8 in blocks of 128 x 128", "FP8 per channel"
_TENSOR, _STATIC = "FP8 per tensor", "FP8 per tensor with static inputs"
FORMATS = [
    StoredFormat("fp8, blocks", "fp8", _BLOCK, _block("weight_scale_inv", lambda scales: scales, F32),
                 {"weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"},
                 "modules_to_not_convert"),
    StoredFormat("fp8, transformers' names", "fp8", _STATIC,
                 _tensor(("weight_scale_inv", "activation_scale"), [], BF16),
                 {"weight_block_size": None, "activation_scheme": "static"}, "modules_to_not_convert"),
    StoredFormat("fp8, dynamic", "fp8", _TENSOR, _tensor(("weight_scale", None), [1], F32),
                 {"activation_scheme": "dynamic"}, "ignored_layers",
                 additional=_scales_of_cache("k_scale", "v_scale")),
    StoredFormat("fp8, static", "fp8", _STATIC, _tensor(("weight_scale", "input_scale"), [], F32),
                 {"activation_scheme": "static"}, "ignored_layers",
                 additional=_scales_of_cache("attn.k_scale", "attn.v_scale")),
    StoredFormat("fbgemm_fp8", "fbgemm_fp8", "FP8 per channel, inputs up to 1200", _channel([1], F32),
                 {"activation_scale_ub": 1200.0}, "modules_to_not_convert"),
    StoredFormat("compressed-tensors, blocks", "compressed-tensors", _BLOCK,
                 _block("weight_scale", lambda scales: scales, BF16),
                 _compressed("float-quantized", "block", True, block_structure=[128, 128]), "ignore"),
    StoredFormat("compressed-tensors, tensor", "compressed-tensors", _STATIC,
                 _tensor(("weight_scale", "input_scale"), [1], BF16),
                 _compressed("float-quantized", "tensor", False), "ignore",
                 additional=_scales_of_cache("k_scale", "v_scale")),
    StoredFormat("compressed-tensors, channel", "compressed-tensors", _CHANNEL, _channel([1], BF16),
                 _compressed("float-quantized", "channel", True), "ignore"),
    StoredFormat("compressed-tensors, INT8", "compressed-tensors", "INT8 per channel",
                 _channel([1], BF16, 127),
                 _compressed("int-quantized", "channel", True, "int"), "ignore"),
    StoredFormat("compressed-tensors, INT8, static", "compressed-tensors", "INT8 per channel",
                 _channel([1], BF16, 127, True),
                 _compressed("int-quantized", "channel", False, "int"), "ignore"),
    StoredFormat("quark, tensor", "quark", _STATIC, _tensor(("weight_scale", "input_scale"), [], F32),
                 _quark("per_tensor", "fp8_e4m3", False), "exclude",
                 additional=_scales_of_cache("k_proj.output_scale", "v_proj.output_scale")),
    StoredFormat("quark, channel", "quark", _CHANNEL, _channel([], BF16),
                 _quark("per_channel", "fp8_e4m3", True), "exclude"),
    StoredFormat("quark, INT8", "quark", "INT8 per channel", _channel([], F32, 127),
                 _quark("per_channel", "int8", True), "exclude"),
    StoredFormat("modelopt FP8", "modelopt", _STATIC, _tensor(("weight_scale", "input_scale"), [], F32),
                 {"quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.47"}}, "ignore",
                 additional=_scales_of_cache("k_proj.k_scale", "v_proj.v_scale")),
    StoredFormat("modelopt FP8_PER_CHANNEL_PER_TOKEN", "modelopt", _CHANNEL, _channel([], F32),
                 {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "ignore"),
    StoredFormat("modelopt FP8_PB_WO", "modelopt", _BLOCK,
                 _block("weight_scale", lambda scales: scales[:, None, :, None], F32),
                 {"quant_algo": "fp8_pb_wo"}, "ignore"),
]  # fmt: skip


_LATENT = FP8_MODELS[2]
QUANTIZED_MODELS = [
    Tiny("llama", "llama", 4, FP8_MODELS[0].config | {"num_hidden_layers": 1, "attention_bias": True}),
    Tiny("qwen3-moe", "qwen3_moe", 3, FP8_MODELS[1].config | {"num_hidden_layers": 1, "mlp_only_layers": []}),
    Tiny("deepseek-v3", "deepseek_v3", 1, _LATENT.config | {"num_hidden_layers": 2}),
    Tiny("gpt-oss", "gpt_oss", 2,
         tiny("gpt-oss").config | {"hidden_size": 200, "num_hidden_layers": 1, "num_attention_heads": 4,
                                   "num_key_value_heads": 4, "head_dim": 64}),
]  # fmt: skip

_WIDE = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 256}  # fmt: skip
OTHER_FAMILIES = [
    *(
        replace(tiny(name), config=tiny(name).config | _WIDE)
        for name in ("smollm3", "phi3", "olmo2", "olmo3", "ministral3")
    ),
    # Logits that are neither too small nor multiplied, for the tolerance.
    replace(
        tiny("gemma3"),
        config=tiny("gemma3").config | _WIDE | {"tie_word_embeddings": False, "query_pre_attn_scalar": 64},
    ),
    replace(tiny("granite"), config=tiny("granite").config | _WIDE | {"logits_scaling": 1.0}),
    replace(tiny("minimax-m2"), config=tiny("minimax-m2").config | _WIDE),
    Tiny("glm-4.7-flash", "glm4_moe_lite", 1, _LATENT.config | {"num_hidden_layers": 2}),
]
"""Wide enough for whole blocks on two ranks; in one format of each kind."""


def save_quantized(model: Tiny, format: StoredFormat, directory: Path) -> torch.nn.Module:
    """Save the model in the format; returns transformers' model of the dequantized numbers, float32."""
    save_tiny(model, directory)
    path, settings = directory / "model.safetensors", directory / "config.json"
    plain = load_file(path)
    stored: Tensors = {}
    for name in list(plain):
        if not QUANTIZED.search(name):
            stored[name] = plain[name]
            continue
        module = name.removesuffix(".weight")
        tensors, plain[name] = format.store(plain[name])
        stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    if model.model_type != "deepseek_v3":
        layers = json.loads(settings.read_text())["num_hidden_layers"]
        for layer in range(layers):
            stored |= format.additional(f"model.layers.{layer}.self_attn")
    save_file(plain, path, metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    reference.config._experts_implementation = "eager"
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads(settings.read_text()) | {"quantization_config": format.config(model.model_type)}
    settings.write_text(json.dumps(config))
    return reference


def parts_quantized(model: Tiny, format: StoredFormat) -> str:
    """Which layers the checkpoint of `save_quantized` has in the format."""
    return "linear" if model.model_type in ("llama", "gpt_oss") else "all"
