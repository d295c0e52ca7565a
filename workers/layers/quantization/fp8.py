"""The method fp8: blocks, as DeepSeek V3 stores them, or one scale for each tensor.

transformers and vLLM give the scales of tensors different names, under the same configuration. DeepSeek-V4
has its routed experts in MXFP4, which `expert_dtype` says; the preparation step copies it from config.json.
"""

from collections.abc import Mapping
from typing import Any

from workers.layers.quantization.block_fp8 import block_fp8, block_of
from workers.layers.quantization.channel_fp8 import tensor_fp8
from workers.layers.quantization.mxfp4 import mxfp4
from workers.layers.quantization.rules import Rule, Rules, as_written, excluded, one_of, part
from workers.layers.quantization.scheme import Scheme

_EXCLUSIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude")
_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale")
_BLOCK_SCALES = ("weight_scale_inv", "scale")
_EXPERTS = "ffn.experts"


def rules(stated: Mapping[str, Any]) -> Rules:
    """Everything in one scheme, but for the modules that are not converted, and experts in MXFP4."""
    fp4 = one_of(stated, "expert_dtype", ("fp4", "fp8"), "fp8") == "fp4"
    experts = (Rule(_EXPERTS, mxfp4("weight", "scale"), part),) if fp4 else ()
    return Rules(_scheme(stated), (*excluded(stated, _EXCLUSIONS, as_written), *experts))


def _scheme(stated: Mapping[str, Any]) -> Scheme:
    one_of(stated, "fmt", ("e4m3",), "e4m3")
    one_of(stated, "scale_fmt", ("ue8m0", "float"), None)
    if (block := stated.get("weight_block_size")) is not None:
        one_of(stated, "activation_scheme", ("dynamic",), "dynamic")
        return block_fp8(*block_of(block, "weight_block_size"), *_BLOCK_SCALES)
    scheme = one_of(stated, "activation_scheme", ("dynamic", "static"), "dynamic")
    return tensor_fp8(scheme == "static", _SCALES, _INPUT_SCALES)
