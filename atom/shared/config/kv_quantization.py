"""The number format of the KV cache that a checkpoint asks for, by its quantization_config.

kv_cache_scheme        compressed-tensors, modelopt   {"type": "float", "num_bits": 8}
kv_cache_quant_algo    modelopt                       "FP8"
export.kv_cache_group  quark                          projections whose output_tensors are cached
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from atom.shared.config.fields import ConfigError

FP8 = "FP8"
_QUARK_FP8 = "fp8_e4m3"


def kv_format(stated: Any) -> str | None:
    """`FP8`, or the name of a format that is not supported; None if the checkpoint does not ask for one.

    Raises ConfigError for settings that say nothing.
    """
    if not isinstance(stated, Mapping):
        return None
    stated = {**stated, **_object(stated, "quantization")}  # as in hf_quant_config.json
    if scheme := _object(stated, "kv_cache_scheme"):
        return _of_scheme(scheme)
    if (algorithm := stated.get("kv_cache_quant_algo")) is not None:
        if not isinstance(algorithm, str) or not algorithm:
            raise _contradiction("kv_cache_quant_algo", algorithm, "the name of a format")
        return algorithm.upper()
    return _of_quark(stated)


def _of_scheme(scheme: Mapping[str, Any]) -> str:
    kind = scheme.get("type", "int")
    bits = scheme.get("num_bits", 8)
    if kind not in ("float", "int") or type(bits) is not int:
        raise _contradiction("kv_cache_scheme", scheme, "the type and num_bits of a format")
    return f"{'FP' if kind == 'float' else 'INT'}{bits}"


def _of_quark(stated: Mapping[str, Any]) -> str | None:
    group = _object(stated, "export").get("kv_cache_group") or []
    if not isinstance(group, list) or not all(isinstance(pattern, str) for pattern in group):
        raise _contradiction("kv_cache_group", group, "a list of layers")
    if not group:
        return None
    layers = _object(stated, "layer_quant_config")
    for name in layers:
        if any(fnmatchcase(name, pattern) for pattern in group):
            outputs = _object(_object(layers, name), "output_tensors")
            dtype = outputs.get("dtype")
            return FP8 if dtype == _QUARK_FP8 else str(dtype)
    raise _contradiction("kv_cache_group", group, "layers of layer_quant_config")


def _object(stated: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`; empty if it is missing or null."""
    found = stated.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise _contradiction(key, found, "an object")
    return found


def _contradiction(key: str, found: Any, wanted: str) -> ConfigError:
    return ConfigError(f"quantization_config of the checkpoint: {key} {found!r:.60} is not {wanted}")
