"""What a checkpoint's files say about its quantization.

config.json under quantization_config, in older files compression_config; or a file next to it:
quantize_config.json (GPTQ, AWQ) or hf_quant_config.json (modelopt).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workers.checkpoint.checkpoint_files import LANGUAGE_MODEL
from workers.checkpoint.hf_config import read_json

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_EXPERT_DTYPE = "expert_dtype"
"""DeepSeek-V4 states it next to its quantization_config; transformers reads it there and within."""
_MODELOPT = "hf_quant_config.json"
_GPTQ = "quantize_config.json"
# What QuantizationConfig reads: some libraries quantize routers too, which config.json does not say.
_ROUTERS = "quantized_routers"
_PACKED_ROUTERS = ("mlp.gate.qweight", "block_sparse_moe.gate.qweight", "mlp.router.qweight")


def stated_quantization(config: Mapping[str, Any], directory: Path) -> Any:
    """The quantization_config, None for a plain checkpoint. Raises ValueError if two files contradict.

    Modules of the language model of a multimodal checkpoint have the names that it has alone.
    """
    return _with_model_names(_stated(config, directory))


def _with_model_names(stated: Any) -> Any:
    if isinstance(stated, str):
        return stated.replace(LANGUAGE_MODEL, "", 1)
    if isinstance(stated, Mapping):
        return {_with_model_names(key): _with_model_names(value) for key, value in stated.items()}
    return [_with_model_names(each) for each in stated] if isinstance(stated, list) else stated


def _stated(config: Mapping[str, Any], directory: Path) -> Any:
    stated = next((config[key] for key in QUANTIZATION_KEYS if config.get(key) is not None), None)
    if stated is None:
        return _of_files(directory)
    if isinstance(stated, Mapping) and config.get(_EXPERT_DTYPE) is not None:
        stated = {_EXPERT_DTYPE: config[_EXPERT_DTYPE], **stated}
    if isinstance(stated, Mapping) and stated.get("quant_method") == "modelopt":
        return _with_file(stated, _of_modelopt(directory), directory)
    return stated


def with_routers(config: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """`config` with a mark in quantization_config if `tensors`, the checkpoint's, have packed routers."""
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping) or not any(name.endswith(_PACKED_ROUTERS) for name in tensors):
        return dict(config)
    return {**config, "quantization_config": {**stated, _ROUTERS: True}}


def _of_files(directory: Path) -> dict[str, Any] | None:
    """The settings of the files next to config.json; modelopt may quantize the KV cache alone."""
    modelopt = _of_modelopt(directory)
    if modelopt is not None and modelopt.get("quant_algo") is not None:
        return modelopt
    return {**(modelopt or {}), **(_of_gptq(directory) or {})} or None


def _with_file(
    stated: Mapping[str, Any], in_file: Mapping[str, Any] | None, directory: Path
) -> dict[str, Any]:
    """The settings of config.json, and those of the other file that it lacks."""
    merged = {**(in_file or {}), **stated}
    in_it, in_config = (str((each or {}).get("quant_algo", "")).upper() for each in (in_file, merged))
    if in_it and in_it != in_config:
        raise ValueError(
            f"{directory} is quantized (modelopt) with quant_algo {in_config} in config.json and {in_it} in "
            f"{_MODELOPT}: remove the wrong one"
        )
    return merged


def _of_modelopt(directory: Path) -> dict[str, Any] | None:
    found = read_json(directory / _MODELOPT, missing_is_empty=True).get("quantization")
    if not isinstance(found, Mapping):
        return None
    if found.get("quant_algo") is None and found.get("kv_cache_quant_algo") is None:
        return None
    return {"quant_method": "modelopt", **found}


def _of_gptq(directory: Path) -> dict[str, Any] | None:
    found = read_json(directory / _GPTQ, missing_is_empty=True)
    if not found:
        return None
    return {"quant_method": "awq" if "w_bit" in found or "version" in found else "gptq", **found}
