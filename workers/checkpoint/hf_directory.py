"""Reads a Hugging Face directory into a Checkpoint: JSON files only.

The config is normalised to the form that
transformers 5 writes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atom.shared.config.checkpoint import Checkpoint
from workers.checkpoint.byte_pairs import TEKKEN, tekken_tokens
from workers.checkpoint.chat_templates import template_files
from workers.checkpoint.checkpoint_files import tensors_by_file, tensors_in
from workers.checkpoint.config_values import check_values
from workers.checkpoint.end_tokens import end_tokens
from workers.checkpoint.families import keeps_states, mtp_layers
from workers.checkpoint.hf_config import added_settings, read_config, read_json
from workers.checkpoint.image_settings import TEXT_ALONE, image_settings
from workers.checkpoint.quantization_files import QUANTIZATION_KEYS, stated_quantization
from workers.checkpoint.tokenizer_files import adds_token, find_tokenizer

_AUTO = "auto"
_COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
_QUANTIZED = ("U8", "I8", "I32", "F8_E4M3", "F8_E8M0")
_SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

_EXTENDING_ROPE_TYPES = ("linear", "dynamic", "yarn")
_ROPE_TYPES_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Settings of generation_config.json that are not supported, with their neutral values.
_NOT_APPLIED: Mapping[str, object] = {
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "stop_strings": None,
}

_TEMPLATE_TOKENS = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


def read_directory(
    directory: Path, cache_dir: Path, overrides: Mapping[str, Any], dtype: str = "auto"
) -> Checkpoint:
    """Describe the checkpoint in `directory`; converted files are written to `cache_dir`.

    `overrides` are merged into config.json. A `dtype` other than auto stands for one that cannot be used.
    Raises ValueError, in one line, for an unsupported checkpoint.
    """
    config = normalised_config(read_config(directory, overrides), directory, dtype)
    generation = read_json(directory / "generation_config.json", missing_is_empty=True)
    tokenizer_config = read_json(directory / "tokenizer_config.json", missing_is_empty=True)
    tokenizer = find_tokenizer(directory, tokenizer_config, config["vocab_size"], cache_dir)
    tokens = _template_tokens(directory, tokenizer_config)
    ends = end_tokens(
        {"--hf-overrides": overrides, "generation_config.json": generation, "config.json": config},
        tokenizer.path,
        tokens.get("eos_token"),
        config["vocab_size"],
        directory,
    )
    images, no_images = image_settings(directory, config, tokenizer.path)
    templates = template_files(directory, tokenizer_config, config["model_type"], cache_dir)
    return Checkpoint(
        directory=str(directory),
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        hf_config=config,
        dtype=config["dtype"],
        vocab_size=config["vocab_size"],
        max_model_len=positions(config),
        eos_token_ids=ends.ids,
        default_sampling=_default_sampling(generation),
        ignored_defaults=_ignored_defaults(generation),
        warnings=[
            *added_settings(directory, overrides),
            *ends.warnings,
            *tokenizer.warnings,
            *(
                [f"requests with images are refused: {no_images}"]
                if no_images not in ("", TEXT_ALONE)
                else []
            ),
        ],
        tokenizer_file=str(tokenizer.path) if tokenizer.path else None,
        chat_template_file=templates.default,
        template_tokens=tokens,
        keeps_states=keeps_states(config["model_type"]),
        mtp_layers=mtp_layers(config["model_type"], config),
        add_bos_token=_add_bos(tokenizer.path, tokenizer_config, tokens),
        tool_template_file=templates.tool_use,
        images=images,
        no_images=no_images,
    )


def normalised_config(config: dict[str, Any], directory: Path, dtype: str = "auto") -> dict[str, Any]:
    """`config` completed as transformers 5 does; `dtype` as in `read_directory`.

    Raises ValueError for unsupported settings.
    """
    where = directory / "config.json"
    check_values(config, where)
    made = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    made.update(_quantization(config, directory))
    made["rope_parameters"] = _rope_parameters(config, where)
    made["dtype"] = _dtype(config, directory, dtype)
    return made


def _quantization(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The settings of a quantized checkpoint. Raises ValueError for a format that cannot run."""
    stated = stated_quantization(config, directory)
    if stated is None:
        return {}
    from workers.layers.quantization.config import resolve  # imports torch

    try:
        resolve({**config, "quantization_config": stated})
    except ValueError as error:
        raise ValueError(f"{directory} is {error}") from None
    return {"quantization_config": stated}


def positions(config: Mapping[str, Any]) -> int:
    """The context length of the model.

    max_position_embeddings is the length before these RoPE types extend it; llama3 and longrope
    checkpoints state the extended length, as do those with RoPE settings by layer type.
    """
    limit = int(config["max_position_embeddings"])
    rope = config["rope_parameters"]
    if rope.get("rope_type") not in _EXTENDING_ROPE_TYPES:
        return limit
    original = rope.get("original_max_position_embeddings") or limit
    return max(limit, int(original * rope.get("factor", 1.0)))


def _rope_parameters(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The RoPE settings, or those of each layer type; a missing theta is left to the model file's default."""
    stated = config.get("rope_parameters", {})
    by_type = [isinstance(value, Mapping) for value in stated.values()]
    if not any(by_type):
        return _completed_rope(config, stated)
    if not all(by_type):
        raise ValueError(
            f"{where} has both common rope_parameters and some by layer type: state all of them by layer type"
        )
    return {kind: _completed_rope(config, rope) for kind, rope in stated.items()}


def _completed_rope(config: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default"} | {name: value for name, value in stated.items() if value is not None}
    return rope | _trained_length(config, rope)


def _trained_length(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The context length before RoPE scaling, and the scaling factor."""
    limit = config["max_position_embeddings"]
    if rope["rope_type"] == "dynamic":
        return {"original_max_position_embeddings": limit}
    if rope["rope_type"] not in _ROPE_TYPES_WITH_ORIGINAL_LENGTH:
        return {}
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    found = {"original_max_position_embeddings": original or limit}
    if rope["rope_type"] != "llama3" and "factor" not in rope and original:
        found["factor"] = limit / original
    return found


def _dtype(config: Mapping[str, Any], directory: Path, wanted: str) -> str:
    """The compute dtype: that of config.json, or of the weights; else `wanted`, unless it is auto."""
    named = str(config.get("dtype") or _AUTO).removeprefix("torch.")
    dtype = _dtype_of_weights(directory) if named == _AUTO else named
    if dtype in _COMPUTE_DTYPES:
        return dtype
    if wanted != _AUTO:
        return wanted
    raise ValueError(
        f"{directory} has dtype {dtype}, which is not supported: choose one of {', '.join(_COMPUTE_DTYPES)} "
        "with --dtype"
    )


def _dtype_of_weights(directory: Path) -> str:
    """The dtype of the first matrix that is not quantized; float32 if there is none."""
    for path in tensors_by_file(directory) if any(directory.glob("*.safetensors")) else ():
        for name, tensor in tensors_in(path)[1].items():
            if len(tensor["shape"]) > 1 and tensor["dtype"] not in _QUANTIZED and "_scale" not in name:
                dtype = str(tensor["dtype"])
                return _SAFETENSORS_DTYPES.get(dtype, dtype)
    return "float32"


def _default_sampling(generation: Mapping[str, Any]) -> dict[str, float | int]:
    # Also without do_sample: the values are the model's recommendation for requests that sample.
    return {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}


def _ignored_defaults(generation: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={generation[name]}"
        for name, neutral in _NOT_APPLIED.items()
        if generation.get(name) is not None and generation[name] != neutral
    ]


def _template_tokens(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    older = read_json(directory / "special_tokens_map.json", missing_is_empty=True)
    found = {}
    for role in _TEMPLATE_TOKENS:
        name = f"{role}_token"
        text = _token_text(tokenizer_config.get(name) or older.get(name))
        if text is not None:
            found[name] = text
    if not found and (directory / TEKKEN).exists():
        return tekken_tokens()
    return found


def _token_text(token: str | dict[str, str] | None) -> str | None:
    """The text of a token that is given as a string or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _add_bos(tokenizer: Path | None, config: Mapping[str, Any], tokens: Mapping[str, str]) -> bool:
    """Whether the frontend must add the begin-of-sequence token that tokenizer.json does not add."""
    if tokenizer is None or not config.get("add_bos_token") or "bos_token" not in tokens:
        return False
    return not adds_token(tokenizer, tokens["bos_token"])
