"""Reads config.json with the user's overrides, under the names of transformers 5.

    old                                     new
    torch_dtype                             dtype
    rope_scaling {"type": …, …}             rope_parameters {"rope_type": …, …,
    rope_theta, partial_rotary_factor           "rope_theta": …, "partial_rotary_factor": …}
    rope_local_base_freq                    rope_parameters {"full_attention": …, "sliding_attention": …}
    model_max_length                        max_position_embeddings
    text_config {…}                         its settings, in place of it

All are converted before they are merged: otherwise an override with an old name would not replace a setting
with a new one. The settings of a multimodal checkpoint's language model are settings of the checkpoint, of
which only that model runs.
"""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.checkpoint.families import config_defaults

_FLAG = "--hf-overrides"
_RENAMED = ("torch_dtype", "rope_scaling", "rope_theta", "partial_rotary_factor")
_OLD_LONGROPE = "su"
_LENGTH = "max_position_embeddings"
_OLD_LENGTH = "model_max_length"
_LOCAL_THETA = "rope_local_base_freq"
_WITHIN_OTHERS = ("mistral4",)
"""Families whose multimodal checkpoints have the model_type of another one."""
_OF_PARTS = ("text_config", "vision_config", "audio_config")
# Settings that every config has, also if config.json does not state them.
_IMPLIED = {"dtype", "rope_parameters"}
# May be one id or a list of ids, whichever config.json has.
_ANY_KIND = ("eos_token_id",)
_KINDS = {bool: "true or false", str: "a string", list: "a list", dict: "an object"}


def read_config(directory: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of config.json, merged with `overrides` (object by object; a list is replaced).

    Raises ValueError if no architecture is named, and for an override of another type.
    """
    path = directory / "config.json"
    stated = read_json(path)
    config = with_new_names({**config_defaults(stated.get("model_type")), **_of_language_model(stated)})
    changes = with_new_names(overrides)
    _check_kinds(config, changes, "")
    merged = _merged(config, changes)
    named = merged.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise ValueError(f"{path} names no architecture")
    return merged


def added_settings(directory: Path, overrides: Mapping[str, Any]) -> list[str]:
    """A warning for each override of a setting that config.json does not have: possibly a typo."""
    config = with_new_names(read_json(directory / "config.json"))
    known = sorted(config.keys() | _IMPLIED)
    lines = []
    for name in with_new_names(overrides):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            lines.append(f"{_FLAG} adds {name}, which config.json does not have{hint}")
    return lines


def with_new_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with old names replaced by new ones."""
    config = _of_language_model(config)
    made = {name: value for name, value in config.items() if name not in _RENAMED}
    if made.get("dtype") is None and config.get("torch_dtype") is not None:
        made["dtype"] = config["torch_dtype"]
    if _LENGTH not in made and config.get(_OLD_LENGTH) is not None:
        made[_LENGTH] = made.pop(_OLD_LENGTH)
    rope = _rope_object(config)
    by_type = bool(rope) and all(isinstance(value, dict) for value in rope.values())
    for name in ("rope_theta", "partial_rotary_factor"):
        if config.get(name) is not None and not by_type:
            rope.setdefault(name, config[name])
    local = made.pop(_LOCAL_THETA, None)
    if local is not None and not any(isinstance(value, dict) for value in rope.values()):
        sliding = {"rope_type": "default", "rope_theta": local}
        rope = {"full_attention": {"rope_type": "default"} | rope, "sliding_attention": sliding}
    if rope:
        made["rope_parameters"] = rope
    return made


def _of_language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a multimodal checkpoint's language model; those stated outside have precedence."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    outer = {
        name: value
        for name, value in config.items()
        if name not in _OF_PARTS and (value is not None or name not in inner)
    }
    if inner.get("model_type") in _WITHIN_OTHERS:
        outer["model_type"] = inner["model_type"]
    return {**inner, **outer}


def read_json(path: Path, missing_is_empty: bool = False) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError with the file's name."""
    if missing_is_empty and not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def _rope_object(config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE object under its old or new name; the old one has precedence, as in transformers."""
    given = [name for name in ("rope_scaling", "rope_parameters") if name in config]
    if not given:
        return {}
    name = next((name for name in given if config[name]), given[0])
    # null means no scaling.
    rope = config[name] or {"rope_type": "default"}
    if not isinstance(rope, dict):
        raise ValueError(f"{name} must be an object, not {rope!r:.40}")
    # "type" is the older name of "rope_type"; if both are given, "rope_type" is used.
    made = {key: value for key, value in rope.items() if key != "type"}
    made = {"rope_type": rope["type"], **made} if "type" in rope else made
    return made | {"rope_type": "longrope"} if made.get("rope_type") == _OLD_LONGROPE else made


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(config)
    for name, value in changes.items():
        old = made.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merged(old, value)
        made[name] = value
    return made


def _check_kinds(config: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for an override of another type than the setting; null is always allowed."""
    for name, value in changes.items():
        old = config.get(name)
        if old is None or value is None or name in _ANY_KIND:
            continue
        if _kind(value) != _kind(old):
            raise ValueError(
                f"{_FLAG}: {where}{name} must be {_kind(old)} as in config.json, not {value!r:.40}"
            )
        if isinstance(value, dict):
            _check_kinds(old, value, f"{where}{name}.")


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a number")
