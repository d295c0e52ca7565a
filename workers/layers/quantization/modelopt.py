"""The method modelopt, NVIDIA's, in config.json or in hf_quant_config.json next to it.

FP8: one scale for each tensor and for its inputs. FP8_PER_CHANNEL_PER_TOKEN. FP8_PB_WO: blocks of 128 x 128.
NVFP4: groups of 16 inputs.
MIXED_PRECISION: one of these for each module listed in quantized_layers, all else plain. None, with a
kv_cache_quant_algo: only the KV cache is quantized.
"""

from collections.abc import Callable, Mapping
from typing import Any

from workers.layers.quantization import nvfp4
from workers.layers.quantization.block_fp8 import block_fp8
from workers.layers.quantization.channel_fp8 import channel_fp8, tensor_fp8
from workers.layers.quantization.rules import Rule, Rules, exact, excluded, one_of, section, substring
from workers.layers.quantization.scheme import PLAIN, Scheme

ALGORITHMS: dict[str, Callable[[], Scheme]] = {
    "FP8": lambda: tensor_fp8(True),
    "FP8_PER_CHANNEL_PER_TOKEN": channel_fp8,
    "FP8_PB_WO": lambda: block_fp8(128, 128, "weight_scale"),
    "NVFP4": nvfp4.modelopt,
}
"""`quant_algo` -> the function that makes its scheme."""
_MIXED = "MIXED_PRECISION"
_EXCLUSIONS = ("ignore", "exclude_modules")


def rules(stated: Mapping[str, Any]) -> Rules:
    """One algorithm, or one for each listed module."""
    stated = {**stated, **section(stated, "quantization")}  # as in hf_quant_config.json
    if stated.get("quant_algo") is None and stated.get("kv_cache_quant_algo") is not None:
        return Rules(PLAIN)
    # Its writer lists paths, parts of them, and globs.
    excluded_rules = excluded(stated, _EXCLUSIONS, substring, forms=True)
    if _algorithm(stated) != _MIXED:
        return Rules(_scheme(stated), excluded_rules)
    layers = section(stated, "quantized_layers")
    if not layers:
        raise ValueError(f"quant_algo {_MIXED} and no quantized_layers")
    mixed = (Rule(path, _scheme(section(layers, path)), exact) for path in layers)
    return Rules(PLAIN, (*excluded_rules, *mixed))


def _scheme(stated: Mapping[str, Any]) -> Scheme:
    if (name := _algorithm(stated)) not in ALGORITHMS:
        raise ValueError(f"quant_algo {name!r:.40}; supported: {', '.join([*ALGORITHMS, _MIXED])}")
    if name == "NVFP4":
        one_of(stated, "group_size", (nvfp4.GROUP,), nvfp4.GROUP)
    return ALGORITHMS[name]()


def _algorithm(stated: Mapping[str, Any]) -> str:
    name = stated.get("quant_algo")
    if not isinstance(name, str):
        raise ValueError(f"quant_algo {name!r:.40}, not the name of one")
    return name.upper()
