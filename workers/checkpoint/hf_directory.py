"""Reads a Hugging Face directory into a Checkpoint: JSON files only.

transformers is imported only to convert a slow tokenizer. The config is normalised to the form that
transformers 5 writes.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from atom.shared.config.checkpoint import Checkpoint
from workers.checkpoint.atomic_file import write_atomically
from workers.checkpoint.chat_templates import template_files
from workers.checkpoint.checkpoint_files import tensors_in
from workers.checkpoint.config_values import check_values, id_list
from workers.checkpoint.families import keeps_states, mtp_layers
from workers.checkpoint.hf_config import added_settings, read_config, read_json
from workers.checkpoint.quantization_files import QUANTIZATION_KEYS, stated_quantization

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
_SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class _TokenizerJson(msgspec.Struct):
    """The only part of tokenizer.json that is decoded."""

    post_processor: Any = None


def read_directory(directory: Path, cache_dir: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """Describe the checkpoint in `directory`; converted files are written to `cache_dir`.

    `overrides` are merged into config.json.
    Raises ValueError, in one line, for an unsupported checkpoint.
    """
    config = normalised_config(read_config(directory, overrides), directory)
    generation = read_json(directory / "generation_config.json", missing_is_empty=True)
    tokenizer_config = read_json(directory / "tokenizer_config.json", missing_is_empty=True)
    tokenizer = _tokenizer_file(directory, cache_dir)
    tokens = _template_tokens(directory, tokenizer_config)
    templates = template_files(directory, tokenizer_config, cache_dir)
    return Checkpoint(
        directory=str(directory),
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        hf_config=config,
        dtype=config["dtype"],
        vocab_size=config["vocab_size"],
        max_model_len=positions(config),
        eos_token_ids=_end_ids(directory, overrides, generation, config),
        default_sampling=_default_sampling(generation),
        ignored_defaults=_ignored_defaults(generation),
        added_settings=added_settings(directory, overrides),
        tokenizer_file=str(tokenizer) if tokenizer else None,
        chat_template_file=templates.default,
        template_tokens=tokens,
        keeps_states=keeps_states(config["model_type"]),
        mtp_layers=mtp_layers(config["model_type"], config),
        add_bos_token=_add_bos(tokenizer, tokenizer_config, tokens),
        tool_template_file=templates.tool_use,
    )


def normalised_config(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """`config` completed as transformers 5 does. Raises ValueError for unsupported settings."""
    where = directory / "config.json"
    check_values(config, where)
    made = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    made.update(_quantization(config, directory))
    made["rope_parameters"] = _rope_parameters(config, where)
    made["dtype"] = _dtype(config, directory)
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
    checkpoints state the extended length.
    """
    limit = int(config["max_position_embeddings"])
    rope = config["rope_parameters"]
    if rope.get("rope_type") not in _EXTENDING_ROPE_TYPES:
        return limit
    original = rope.get("original_max_position_embeddings") or limit
    return max(limit, int(original * rope.get("factor", 1.0)))


def _rope_parameters(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The RoPE settings; a missing theta is left to the model file's default."""
    stated = config.get("rope_parameters", {})
    if any(isinstance(value, Mapping) for value in stated.values()):
        raise ValueError(f"{where} has separate rope_parameters for each layer type, which is not supported")
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


def _dtype(config: Mapping[str, Any], directory: Path) -> str:
    named = config.get("dtype")
    dtype = str(named).removeprefix("torch.") if named else _dtype_of_weights(directory)
    if dtype not in _COMPUTE_DTYPES:
        supported = ", ".join(_COMPUTE_DTYPES)
        raise ValueError(f"{directory} has dtype {dtype}, which is not supported; supported are {supported}")
    return dtype


def _dtype_of_weights(directory: Path) -> str:
    """The dtype of the first matrix that is not quantized; float32 if there is none."""
    for path in sorted(directory.glob("*.safetensors")):
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


def _end_ids(
    directory: Path, overrides: Mapping[str, Any], generation: Mapping[str, Any], config: Mapping[str, Any]
) -> list[int]:
    """The end-of-sequence ids that are inside the vocabulary."""
    name = "eos_token_id"
    value = next((source[name] for source in (overrides, generation, config) if name in source), None)
    return [token for token in id_list(value, name, directory) if 0 <= token < config["vocab_size"]]


def _template_tokens(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    older = read_json(directory / "special_tokens_map.json", missing_is_empty=True)
    found = {}
    for role in _TEMPLATE_TOKENS:
        name = f"{role}_token"
        text = _token_text(tokenizer_config.get(name) or older.get(name))
        if text is not None:
            found[name] = text
    return found


def _token_text(token: str | dict[str, str] | None) -> str | None:
    """The text of a token that is given as a string or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _tokenizer_file(directory: Path, cache_dir: Path) -> Path | None:
    path = directory / "tokenizer.json"
    if path.exists():
        return path
    sources = [directory / name for name in _SLOW_TOKENIZER_FILES if (directory / name).exists()]
    return _converted_tokenizer(directory, sources, cache_dir) if sources else None


def _converted_tokenizer(directory: Path, sources: list[Path], cache_dir: Path) -> Path:
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    digest = hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
    path = cache_dir / "tokenizers" / f"{digest}.json"
    if path.exists():
        return path
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        text = tokenizer.backend_tokenizer.to_str()
    except (ValueError, ImportError, OSError, AttributeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{directory} has no tokenizer.json, and its {sources[0].name} cannot be converted: {first_line}"
        ) from error
    write_atomically(path, text)
    return path


def _add_bos(tokenizer: Path | None, config: Mapping[str, Any], tokens: Mapping[str, str]) -> bool:
    """Whether the frontend must add the begin-of-sequence token that tokenizer.json does not add."""
    if tokenizer is None or not config.get("add_bos_token") or "bos_token" not in tokens:
        return False
    parsed = msgspec.json.decode(tokenizer.read_bytes(), type=_TokenizerJson)
    return tokens["bos_token"] not in json.dumps(parsed.post_processor, ensure_ascii=False)
