"""Converts a GGUF file into config.json, safetensors and tokenizer.json, with the help of transformers.

Quantized matrices keep their integers (`gguf_blocks`), under the names that the quantization method gguf
reads, for which `quantization_config` lists them; those of other types are expanded to float32. One tensor
is in memory at a time. Settings that transformers ignores silently are corrected here or refused.
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from workers.weights.gguf_blocks import KEPT, STORED, Format, decoded, in_format, joined, kept_format
from workers.weights.gguf_families import GGUF_FAMILIES, Metadata, rope_scaling, why_refused

MAX_SHARD_BYTES = 10**9

# Values of general.architecture whose settings transformers reads; those of others are in `gguf_families`.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NEIGHBOURS = ("llama", *(name for name, family in GGUF_FAMILIES.items() if family.rotates_neighbours))

_ROPE_FACTORS = "rope_freqs.weight"
# GGUF files have only the divisors of the frequencies; Llama 3.1 and later derive them from these parameters.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Pre-tokenizers whose words that are tokens are not split, and that begin prompts with the BOS token.
_WHOLE_WORDS = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
)
_GPT2_PRETOKENIZERS = ("default", "gpt-2")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
# Architectures whose SentencePiece tokenizers put no space before a text.
_WITHOUT_PREFIX = ("gemma2", "gemma3")

# Tokens of the supported families that end a sequence in llama.cpp too, whatever the metadata says: files
# often name one end of several. The last three begin other parts of a code base.
_END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>"),
        *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    )
)
# Modules that the engine fuses: their matrices get one format.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
_FLOATS = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)

# (phase, done, total)
Report = Callable[[str, int, int], None]


def convert(path: Path, directory: Path, report: Report, keep_integers: bool = True) -> None:
    """Write the content of the GGUF file at `path` into `directory`, which exists and is empty.

    Without `keep_integers` all quantized matrices are expanded, so that other programs read them.
    Raises ValueError, in one line, for a file that cannot be served.
    """
    reader = _open(path)
    tokenizer, model = _load(path, reader)
    tensors = _tensors_of(model, reader, path)
    formats = _formats(tensors) if keep_integers else {}
    config = _config(reader, model, formats)
    roles = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {
        f"{role}_token_id": _value(reader, f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()
    }
    _write_json(directory / "config.json", config | ids)
    _write_json(directory / "generation_config.json", ids | {"eos_token_id": _ends(reader)})
    tokenizer.save_pretrained(directory)
    shards = _Shards(directory)
    architecture = _value(reader, "general.architecture")
    for done, (name, tensor) in enumerate(tensors.items()):
        report(f"Converting {path.name}", done, len(tensors))
        rows = _rows(name, tensor, model.config, architecture)
        for part, stored in _converted(name, rows, tensor.tensor_type, formats.get(name)).items():
            shards.add(part, stored)
    shards.close()
    report(f"Converting {path.name}", len(tensors), len(tensors))


def _ends(reader: gguf.GGUFReader) -> list[int]:
    """The ids that end a sequence: those that the file names, and tokens that do by their text."""
    named = [_value(reader, f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = _value(reader, "tokenizer.ggml.tokens", [])
    by_text = [number for number, text in enumerate(tokens) if text in _END_TEXTS]
    return [token for token in dict.fromkeys([*named, *by_text]) if token is not None]


def _tensors_of(model: Any, reader: gguf.GGUFReader, path: Path) -> dict[str, gguf.ReaderTensor]:
    """The file's tensors by the model's names. Raises ValueError unless it has exactly the model's."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = _value(reader, "general.architecture")
    names = gguf.get_tensor_name_map(numbers[architecture], model.config.num_hidden_layers)
    held = {tensor.name: tensor for tensor in reader.tensors}
    found = {}
    for name, wanted in model.state_dict().items():
        if model.config.tie_word_embeddings and name == "lm_head.weight":
            continue
        tensor = held.pop(names.get_name(name, try_suffixes=(".weight", ".bias")), None)
        if tensor is None or tuple(map(int, reversed(tensor.shape))) != tuple(wanted.shape):
            raise ValueError(f"{path.name} lacks {name} in the shape that transformers expects")
        found[name] = tensor
    family = GGUF_FAMILIES.get(architecture)
    if unused := held.keys() - ({_ROPE_FACTORS} if family is None else family.settings):
        raise ValueError(f"{path.name} holds a tensor {min(unused)!r}, which is not supported")
    return found


def _formats(tensors: Mapping[str, gguf.ReaderTensor]) -> dict[str, Format]:
    """The format of each matrix that keeps its integers; one for those that are fused."""
    formats = {
        name: kept_format(tensor.tensor_type)
        for name, tensor in tensors.items()
        if tensor.tensor_type in KEPT and len(tensor.shape) == 2
    }
    for name in list(formats):
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        for fused in _FUSED:
            every = [f"{parent}.{part}.weight" for part in fused]
            if last in fused and all(part in formats for part in every):
                formats |= dict.fromkeys(every, joined(*(formats[part] for part in every)))
    return formats


def _rows(name: str, tensor: gguf.ReaderTensor, config: Any, architecture: str) -> np.ndarray:
    """The tensor in the file's type, as transformers has it: the order of its rows, the offset of a norm."""
    family = GGUF_FAMILIES.get(architecture)
    if family is not None and family.norm_offset and name.endswith("norm.weight"):
        return np.asarray(tensor.data - np.float32(family.norm_offset))
    if architecture not in _NEIGHBOURS or not name.endswith(_ROTATED):
        return tensor.data
    # llama.cpp rotates neighbouring features, and transformers those of the halves of a head.
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    pairs = tensor.data.reshape(heads, -1, 2, *tensor.data.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.data.shape)


def _converted(
    name: str, rows: np.ndarray, kind: gguf.GGMLQuantizationType, format: Format | None
) -> dict[str, torch.Tensor]:
    """The tensors that store it, by their names."""
    if format is None:
        plain = rows if kind in _FLOATS else gguf.quants.dequantize(rows, kind)
        return {name: torch.from_numpy(plain.copy())}
    weight = in_format(decoded(rows, kind), format)
    parts = {part: getattr(weight, part) for part in STORED}
    return {f"{name}_{part}": tensor.contiguous() for part, tensor in parts.items() if tensor is not None}


class _Shards:
    """Writes tensors to files of about MAX_SHARD_BYTES, and the index of several ones."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._waiting: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}
        self._written = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Keep it until enough are there to be written."""
        self._waiting[name] = tensor
        if sum(each.nbytes for each in self._waiting.values()) >= MAX_SHARD_BYTES:
            self._write(f"model-{self._written + 1:05}.safetensors")

    def close(self) -> None:
        """Write what is left."""
        if not self._written:
            self._write("model.safetensors")
            return
        if self._waiting:
            self._write(f"model-{self._written + 1:05}.safetensors")
        _write_json(self._directory / "model.safetensors.index.json", {"weight_map": self._files})

    def _write(self, name: str) -> None:
        save_file(self._waiting, self._directory / name, {"format": "pt"})
        self._files |= dict.fromkeys(self._waiting, name)
        self._written += 1
        self._waiting = {}


def _open(path: Path) -> gguf.GGUFReader:
    """The opened file. Raises ValueError for an unsupported one, from its metadata alone."""
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from None
    architecture = _value(reader, "general.architecture", "(none)")
    if why := why_refused(architecture, _ARCHITECTURES):
        raise ValueError(f"{path.name} has {why}")
    if _value(reader, "split.count", 1) > 1:
        raise ValueError(f"{path.name} is one part of a split model; merge the parts into one file first")
    if _value(reader, f"{architecture}.expert_count", 0) > 0:
        raise ValueError(f"{path.name} is a mixture of experts, which is not supported yet")
    return reader


def _value(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _load(path: Path, reader: gguf.GGUFReader) -> tuple[Any, Any]:
    """(tokenizer, model without weights)."""
    logging.set_verbosity_error()
    pre_tokenizer = _value(reader, "tokenizer.ggml.pre", "default")
    # The file's own metadata takes precedence.
    add_bos = {"add_bos_token": True} if pre_tokenizer in _WHOLE_WORDS else {}
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}
    try:
        # Hide transformers' own progress bars.
        with contextlib.redirect_stderr(io.StringIO()), _read_once(reader), torch.device("meta"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(**source, **add_bos)
            _complete_tokenizer(tokenizer.backend_tokenizer, reader, pre_tokenizer)
            model = AutoModelForCausalLM.from_config(_model_config(reader, source))
    except (ValueError, NotImplementedError, RuntimeError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"{path.name} cannot be expanded: {' '.join(str(error).split())}") from error
    return tokenizer, model


def _model_config(reader: gguf.GGUFReader, source: Mapping[str, Any]) -> Any:
    """transformers' configuration of the file's model."""
    architecture = _value(reader, "general.architecture")
    if architecture not in GGUF_FAMILIES:
        return AutoConfig.from_pretrained(**source)
    settings = dict(GGUF_FAMILIES[architecture].config(Metadata(reader, architecture)))
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


@contextlib.contextmanager
def _read_once(reader: gguf.GGUFReader) -> Iterator[None]:
    """Within it transformers gets this reader and one table of names.

    Otherwise it parses the file twice more and builds the table for each of the model's modules, which
    takes longer than the weights of a small model.
    """
    names = gguf.get_tensor_name_map
    readers = gguf.GGUFReader
    gguf.get_tensor_name_map = cache(names)
    gguf.GGUFReader = lambda path: reader
    try:
        yield
    finally:
        gguf.get_tensor_name_map = names
        gguf.GGUFReader = readers


def _complete_tokenizer(backend: Any, reader: gguf.GGUFReader, pre_tokenizer: str) -> None:
    """Set what transformers leaves out for this `pre_tokenizer` (tokenizer.ggml.pre)."""
    if _value(reader, "tokenizer.ggml.model") != "gpt2":
        stated = bool(_value(reader, "tokenizer.ggml.add_space_prefix", True))
        if stated == (_value(reader, "general.architecture") in _WITHOUT_PREFIX):
            raise ValueError(f"add_space_prefix = {str(stated).lower()} is not supported")
        return
    if pre_tokenizer in _SINGLE_DIGITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre_tokenizer == "qwen2":
        backend.normalizer = normalizers.NFC()
    elif pre_tokenizer in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    elif (
        isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
        and pre_tokenizer not in _GPT2_PRETOKENIZERS
    ):
        raise ValueError(f"its pre-tokenizer {pre_tokenizer!r} is not supported")


def _config(reader: gguf.GGUFReader, model: Any, formats: Mapping[str, Format]) -> dict[str, Any]:
    """Contents of config.json; dtype is the compute dtype: bfloat16 unless all matrices are float32."""
    read = model.config.to_dict()
    modules: dict[str, list[str]] = {}
    for name, format in formats.items():
        modules.setdefault(format.name, []).append(name.removesuffix(".weight"))
    quantized = {"quantization_config": {"quant_method": "gguf", "modules": modules}} if modules else {}
    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    return {key: read[key] for key in read if key not in ("quantization_config", "_model_name_or_path")} | {
        "architectures": [type(model).__name__],
        "dtype": "float32" if kinds == {gguf.GGMLQuantizationType.F32} else "bfloat16",
        "rope_parameters": _rope(reader, model.config),
        **quantized,
    }


def _rope(reader: gguf.GGUFReader, config: Any) -> dict[str, Any]:
    """rope_parameters with the file's scaling, which transformers does not read."""
    plain: dict[str, Any] = config.rope_parameters
    architecture = _value(reader, "general.architecture")
    if architecture in GGUF_FAMILIES:
        return plain
    factors = [torch.tensor(tensor.data) for tensor in reader.tensors if tensor.name == _ROPE_FACTORS]
    if factors:
        scaled = plain | _LLAMA3_ROPE | {"rope_type": "llama3", "factor": float(factors[0].max())}
        config.rope_parameters = scaled
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        unscaled = plain["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        if not torch.allclose(unscaled / factors[0], frequencies, rtol=1e-3):
            raise ValueError("the GGUF's rotary frequency factors are not those of Llama 3: not supported")
        return scaled
    return plain | rope_scaling(Metadata(reader, architecture))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
