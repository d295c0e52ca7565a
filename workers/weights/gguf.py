"""Expands a GGUF file with transformers into config.json, safetensors and tokenizer.json.

All weights are converted to float32; the engine rounds them to its compute dtype when it loads them.
Settings that transformers ignores silently are corrected here or refused.
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

MAX_SHARD_BYTES = 4 * 10**9

# Values of general.architecture. Other families run from safetensors only: it has not been checked what
# transformers ignores of their GGUF files.
_ARCHITECTURES = ("llama", "qwen3")

_ROPE_FACTORS = "rope_freqs.weight"
# GGUF files have only the divisors of the frequencies; Llama 3.1 and later derive them from these parameters.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_PRETOKENIZERS = ("llama-bpe", "llama3", "llama-v3")
_GPT2_PRETOKENIZERS = ("default", "gpt-2")

# (phase, done, total)
Report = Callable[[str, int, int], None]


def convert(path: Path, directory: Path, report: Report) -> None:
    """Expand the GGUF file at `path` into files in `directory`, which exists and is empty.

    Needs memory for the whole model in float32. Raises ValueError, in one line, for a file that
    cannot be served.
    """
    reader = _open(path)
    tensors = len(reader.tensors)
    report(f"Expanding {path.name}", 0, tensors)
    tokenizer, model = _load(path, reader)
    report(f"Expanding {path.name}", tensors, tensors)
    report(f"Writing the expanded {path.name}", 0, tensors)
    config = _config(reader, model)
    roles = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {
        f"{role}_token_id": _value(reader, f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()
    }
    ends = [_value(reader, f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = [token for token in dict.fromkeys(ends) if token is not None]
    _write_json(directory / "config.json", config | ids)
    _write_json(directory / "generation_config.json", ids | {"eos_token_id": ends})
    tokenizer.save_pretrained(directory)
    tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    save_torch_state_dict(
        model.state_dict(), directory, max_shard_size=MAX_SHARD_BYTES, shared_tensors_to_discard=tied
    )
    report(f"Writing the expanded {path.name}", tensors, tensors)


def _open(path: Path) -> gguf.GGUFReader:
    """The opened file. Raises ValueError for an unsupported one, from its metadata alone."""
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from None
    architecture = _value(reader, "general.architecture", "(none)")
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"{path.name} has the architecture {architecture}; supported: {', '.join(_ARCHITECTURES)}"
        )
    if _value(reader, "split.count", 1) > 1:
        raise ValueError(f"{path.name} is one part of a split model; merge the parts into one file first")
    if _value(reader, f"{architecture}.expert_count", 0) > 0:
        raise ValueError(f"{path.name} is a mixture of experts, which is not supported yet")
    return reader


def _value(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _load(path: Path, reader: gguf.GGUFReader) -> tuple[Any, Any]:
    """(tokenizer, float32 model). Raises ValueError unless the file has exactly the model's tensors."""
    logging.set_verbosity_error()
    pre_tokenizer = _value(reader, "tokenizer.ggml.pre", "default")
    # The default for Llama 3; the file's own metadata takes precedence.
    add_bos = {"add_bos_token": True} if pre_tokenizer in _LLAMA3_PRETOKENIZERS else {}
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}
    try:
        # Hide transformers' own progress bars.
        with contextlib.redirect_stderr(io.StringIO()), _read_once(reader):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(**source, **add_bos)
            _complete_tokenizer(tokenizer.backend_tokenizer, reader, pre_tokenizer)
            model, info = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except (ValueError, NotImplementedError, RuntimeError, KeyError) as error:
        raise ValueError(f"{path.name} cannot be expanded: {' '.join(str(error).split())}") from error
    if lacking := info["missing_keys"] | {name for name, *_ in info["mismatched_keys"]}:
        raise ValueError(f"{path.name} lacks {min(lacking)} in the shape that transformers expects")
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = architectures[_value(reader, "general.architecture")]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    used = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in model.state_dict()}
    if unused := {tensor.name for tensor in reader.tensors} - used - {_ROPE_FACTORS}:
        raise ValueError(f"{path.name} holds a tensor {min(unused)!r}, which is not supported")
    return tokenizer, model


@contextlib.contextmanager
def _read_once(reader: gguf.GGUFReader) -> Iterator[None]:
    """Within it transformers gets this reader and one table of names.

    Otherwise it parses the file twice more and builds the table for each of the model's modules, which
    takes longer than the weights of a small model.
    """
    names, readers = gguf.get_tensor_name_map, gguf.GGUFReader
    gguf.get_tensor_name_map, gguf.GGUFReader = cache(names), lambda path: reader
    try:
        yield
    finally:
        gguf.get_tensor_name_map, gguf.GGUFReader = names, readers


def _complete_tokenizer(backend: Any, reader: gguf.GGUFReader, pre_tokenizer: str) -> None:
    """Set what transformers leaves out for this `pre_tokenizer` (tokenizer.ggml.pre)."""
    if _value(reader, "tokenizer.ggml.model") != "gpt2":
        if not _value(reader, "tokenizer.ggml.add_space_prefix", True):
            raise ValueError("add_space_prefix = false is not supported")
        return
    if pre_tokenizer == "smollm":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre_tokenizer == "qwen2":
        backend.normalizer = normalizers.NFC()
    elif pre_tokenizer in _LLAMA3_PRETOKENIZERS:
        backend.model.ignore_merges = True
    elif (
        isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
        and pre_tokenizer not in _GPT2_PRETOKENIZERS
    ):
        raise ValueError(f"its pre-tokenizer {pre_tokenizer!r} is not supported")


def _config(reader: gguf.GGUFReader, model: Any) -> dict[str, Any]:
    """Contents of config.json; dtype is the compute dtype: bfloat16 unless all matrices are float32."""
    read = model.config.to_dict()
    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    return {key: read[key] for key in read if key not in ("quantization_config", "_model_name_or_path")} | {
        "architectures": [type(model).__name__],
        "dtype": "float32" if kinds == {gguf.GGMLQuantizationType.F32} else "bfloat16",
        "rope_parameters": _rope(reader, model.config),
    }


def _rope(reader: gguf.GGUFReader, config: Any) -> dict[str, Any]:
    """rope_parameters with the file's scaling, which transformers does not read."""
    plain: dict[str, Any] = config.rope_parameters
    factors = [torch.tensor(tensor.data) for tensor in reader.tensors if tensor.name == _ROPE_FACTORS]
    if factors:
        scaled = plain | _LLAMA3_ROPE | {"rope_type": "llama3", "factor": float(factors[0].max())}
        config.rope_parameters = scaled
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        unscaled = plain["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        if not torch.allclose(unscaled / factors[0], frequencies, rtol=1e-3):
            raise ValueError("the GGUF's rotary frequency factors are not those of Llama 3: not supported")
        return scaled
    prefix = f"{config.model_type}.rope.scaling"
    if (kind := _value(reader, f"{prefix}.type", "none")) == "none":
        return plain
    original = _value(reader, f"{prefix}.original_context_length", config.max_position_embeddings)
    factor = _value(reader, f"{prefix}.factor", 1.0)
    return plain | {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
