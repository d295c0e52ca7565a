"""Converts a GGUF model into config.json, safetensors and tokenizer.json, with the help of transformers.

Quantized matrices keep their integers (`gguf_blocks`), under the names that the quantization method gguf
reads, for which `quantization_config` lists them; those of other types are expanded to float32. One tensor
is in memory at a time. Settings that transformers ignores silently are corrected here or refused.
"""

import contextlib
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from workers.checkpoint.gguf_files import gguf_parts
from workers.weights.gguf_blocks import (
    FP4,
    KEPT,
    STORED,
    Format,
    decoded,
    four_bit_floats,
    in_format,
    joined,
    kept_format,
)
from workers.weights.gguf_families import (
    GGUF_FAMILIES,
    MIXTRAL,
    ROPE_FACTORS,
    GGUFFamily,
    Metadata,
    metadata_value,
    rope_scaling,
    why_refused,
)
from workers.weights.gguf_mtp import copies, mtp_parts, with_mtp_layer
from workers.weights.gguf_tensors import HeldTensors, Maker, Part
from workers.weights.gguf_tokenizers import WITH_BOS, complete_tokenizer

MAX_SHARD_BYTES = 10**9

# Values of general.architecture whose settings transformers reads; those of others are in `gguf_families`.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_BY_TRANSFORMERS = GGUFFamily(lambda data: {}, settings=frozenset({ROPE_FACTORS}))
_LLAMA = replace(_BY_TRANSFORMERS, rotates_neighbours=True)

# GGUF files have only the divisors of the frequencies; Llama 3.1 and later derive them from these parameters.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
# Llama 3 has the first one, Llama 4 the second.
_HIGH_FREQ_FACTORS = (4.0, 1.0)

# Tokens of the supported families that end a sequence in llama.cpp too, whatever the metadata says: files
# often name one end of several. The last three begin other parts of a code base.
_END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<|return|>", "<|call|>", "<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>"),
        *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    )
)
# Where a vocabulary has both, `<|end|>` ends a message, after which the reply goes on (GPT-OSS).
_HARMONY = frozenset(("<|return|>", "<|call|>"))
_HARMONY_MESSAGE = "<|end|>"
# Modules that the engine fuses: their matrices get one format.
_FUSED = (
    *(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")),
    *(("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_GATE_UP = re.compile(r"\.\*\.(gate|up)_proj$")
_STACKS = (("gate_up_proj", "down_proj"),)
# What the engine multiplies by plain numbers alone.
_PLAIN = (
    *(".gate.weight", ".router.weight", ".shared_expert_gate.weight", ".indexer.weights_proj.weight"),
    *(".eh_proj.weight", "mtp.fc.weight"),
)
# transformers' configurations also say where and under which name the file was, and what was not read.
_NOT_KEPT = ("quantization_config", "_model_name_or_path", "_name_or_path")
_FLOATS = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)

# (phase, done, total)
Report = Callable[[str, int, int], None]


def convert(path: Path, directory: Path, report: Report, keep_integers: bool = True) -> None:
    """Write the content of the GGUF model at `path` into `directory`, which exists and is empty.

    `path` is its file, or the first of several.
    Without `keep_integers` all quantized matrices are expanded, so that other programs read them.
    Raises ValueError, in one line, for a file that cannot be served.
    """
    reader = _open(path)
    tokenizer, model, longer = _load(path, reader)
    parts = _parts(model, longer, reader, path)
    formats = _formats(parts, reader) if keep_integers else {}
    config = _config(reader, model, formats)
    roles = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {
        f"{role}_token_id": metadata_value(reader, f"tokenizer.ggml.{key}_token_id")
        for role, key in roles.items()
    }
    _write_json(directory / "config.json", config | ids)
    _write_json(directory / "generation_config.json", ids | {"eos_token_id": _ends(reader)})
    tokenizer.save_pretrained(directory)
    shards = _Shards(directory)
    for done, part in enumerate(parts):
        report(f"Converting {path.name}", done, len(parts))
        for name, stored in _converted(part, formats.get(part.name)).items():
            shards.add(name, stored)
    shards.close()
    report(f"Converting {path.name}", len(parts), len(parts))


def _ends(reader: gguf.GGUFReader) -> list[int]:
    """The ids that end a sequence: those that the file names, and tokens that do by their text."""
    named = [metadata_value(reader, f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = metadata_value(reader, "tokenizer.ggml.tokens", [])
    texts = _END_TEXTS - {_HARMONY_MESSAGE} if _HARMONY.issubset(tokens) else _END_TEXTS
    by_text = [number for number, text in enumerate(tokens) if text in texts]
    return [token for token in dict.fromkeys([*named, *by_text]) if token is not None]


def _family(reader: gguf.GGUFReader) -> GGUFFamily | None:
    """None where transformers reads the settings."""
    architecture = metadata_value(reader, "general.architecture")
    if architecture == "llama" and metadata_value(reader, "llama.expert_count", 0):
        return MIXTRAL
    return GGUF_FAMILIES.get(architecture)


def _has_inputs_first(reader: gguf.GGUFReader) -> bool:
    family = _family(reader)
    return family is not None and family.inputs_first


def _parts(model: Any, longer: Any, reader: gguf.GGUFReader, path: Path) -> list[Part]:
    """All tensors of the checkpoint. Raises ValueError unless the file has exactly the model's."""
    architecture, layers = metadata_value(reader, "general.architecture"), model.config.num_hidden_layers
    family = _family(reader)
    if family is None:
        family = _LLAMA if architecture == "llama" else _BY_TRANSFORMERS
    held = HeldTensors(reader, layers if longer is None else layers + 1, path.name)
    maker = Maker(held, model.config, architecture, family)
    parts = list(maker.parts(model.state_dict()))
    if longer is not None:
        parts += mtp_parts(maker, longer, family.mtp_apart)
    held.check_all_used(family.settings | copies(layers))
    return parts


def _formats(parts: Sequence[Part], reader: gguf.GGUFReader) -> dict[str, Format]:
    """The format of each matrix that keeps its integers; one for those that are fused."""
    formats = {part.name: kept for part in parts if (kept := _kept(part)) is not None}
    if _has_inputs_first(reader):  # these experts have no MXFP4
        formats = {name: format for name, format in formats.items() if format is not FP4}
    for name in list(formats):
        suffix = ".weight" if name.endswith(".weight") else ""
        parent, _, last = name.removesuffix(suffix).rpartition(".")
        for fused in _FUSED if suffix else _STACKS:
            every = [f"{parent}.{part}{suffix}" for part in fused if last in fused]
            found = [formats[part] for part in every if part in formats]
            whole = len(found) == len(every) > 0
            if whole and FP4 not in found:
                formats |= dict.fromkeys(every, joined(*found))
            elif ".experts." in name and not (whole and set(found) == {FP4}):
                # Experts have one format; the engine dequantizes other modules whose parts differ.
                for part in every:
                    formats.pop(part, None)
    return formats


def _kept(part: Part) -> Format | None:
    """The format in which the matrix could stay; None: as numbers."""
    if part.kind == gguf.GGMLQuantizationType.MXFP4:
        return FP4 if part.stacked or ".experts." in part.name else None
    if part.kind not in KEPT or len(part.shape) != 2 or part.name.endswith(_PLAIN):
        return None
    format = kept_format(part.kind)
    heads = 1 if part.tiles is None else math.prod(part.tiles)
    return None if part.shape[1] // heads % format.group else format


def _converted(part: Part, format: Format | None) -> dict[str, torch.Tensor]:
    """The tensors that store it, by their names."""
    data = part.data()
    if format is None:
        plain = data if part.kind in (None, *_FLOATS) else gguf.quants.dequantize(data, part.kind)
        numbers = torch.from_numpy(np.array(plain))
        stored = {part.name: numbers.transpose(1, 2) if part.transposed else numbers.reshape(part.shape)}
    elif format is FP4:
        codes, scales = four_bit_floats(data)
        if part.stacked:
            stored = {f"{part.name}_blocks": codes, f"{part.name}_scales": scales}
        else:
            stored = {f"{part.name}_packed": codes.flatten(-2), f"{part.name}_scale": scales}
    else:
        weight = in_format(decoded(data, part.kind), format)
        tensors = {f"{part.name}_{each}": getattr(weight, each) for each in STORED}
        stored = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {name: part.in_order(tensor).contiguous() for name, tensor in stored.items()}


class _Shards:
    """Writes tensors to files of about MAX_SHARD_BYTES, and the index of several ones."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._files: dict[str, str] = {}
        self._written = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Keep it until enough are there to be written."""
        self._waiting[name] = tensor
        self._waiting_bytes += tensor.nbytes
        if self._waiting_bytes >= MAX_SHARD_BYTES:
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
        self._waiting_bytes = 0


def _open(path: Path) -> gguf.GGUFReader:
    """The first file, opened, with the tensors of all parts.

    Raises ValueError for unsupported ones, from their metadata alone.
    """
    files = gguf_parts(path)
    readers = [_read(file) for file in files]
    first = readers[0]
    architecture = metadata_value(first, "general.architecture", "(none)")
    if why := why_refused(architecture, _ARCHITECTURES):
        raise ValueError(f"{path.name} has {why}")
    for number, (file, reader) in enumerate(zip(files, readers, strict=True)):
        found = (metadata_value(reader, "split.no", 0), metadata_value(reader, "split.count", 0) or 1)
        if found != (number, len(files)):
            raise ValueError(
                f"{file.name} is, by its metadata, part {found[0] + 1} of {found[1]} of a model, which its "
                "name must say, as in NAME-00001-of-00003.gguf"
            )
    for reader in readers[1:]:
        first.tensors += reader.tensors
    total = metadata_value(first, "split.tensors.count", len(first.tensors))
    if total != len(first.tensors):
        raise ValueError(f"the parts of {path.name} have {len(first.tensors)} tensors, and not {total}")
    return first


def _read(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from None


def _load(path: Path, reader: gguf.GGUFReader) -> tuple[Any, Any, Any]:
    """(tokenizer, model without weights, and one with the layer for multi-token prediction or None)."""
    logging.set_verbosity_error()
    pre_tokenizer = metadata_value(reader, "tokenizer.ggml.pre", "default")
    # The file's own metadata takes precedence.
    add_bos = {"add_bos_token": True} if pre_tokenizer in WITH_BOS else {}
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}
    try:
        # Hide transformers' own progress bars.
        with contextlib.redirect_stderr(io.StringIO()), _read_once(reader), torch.device("meta"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(**source, **add_bos)
            complete_tokenizer(tokenizer.backend_tokenizer, reader, pre_tokenizer)
            config, longer_config = _model_configs(reader, source)
            model = AutoModelForCausalLM.from_config(config)
            longer = None if longer_config is None else AutoModelForCausalLM.from_config(longer_config)
    except (ValueError, NotImplementedError, RuntimeError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"{path.name} cannot be expanded: {' '.join(str(error).split())}") from error
    return tokenizer, model, longer


def _model_configs(reader: gguf.GGUFReader, source: Mapping[str, Any]) -> tuple[Any, Any]:
    """transformers' configurations: of the file's model, and with its layer for multi-token prediction."""
    if (family := _family(reader)) is None:
        return AutoConfig.from_pretrained(**source), None
    data = Metadata(reader, metadata_value(reader, "general.architecture"))
    settings = dict(family.config(data))
    name = settings.pop("model_type")
    longer = AutoConfig.for_model(name, **with_mtp_layer(settings)) if data.mtp_layers == 1 else None
    return AutoConfig.for_model(name, **settings), longer


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


def _config(reader: gguf.GGUFReader, model: Any, formats: Mapping[str, Format]) -> dict[str, Any]:
    """Contents of config.json; dtype is the compute dtype: bfloat16 unless all matrices are float32."""
    read = model.config.to_dict()
    modules: dict[str, list[str]] = {}
    for name, format in formats.items():
        module = _EXPERT.sub(".experts.*.", name.removesuffix(".weight"))
        if _has_inputs_first(reader):
            module = _GATE_UP.sub(".*.gate_up_proj", module).replace(".experts.*.", ".experts.")
        found = modules.setdefault(format.name, [])
        if not found or found[-1] != module:
            found.append(module)
    quantized = {"quantization_config": {"quant_method": "gguf", "modules": modules}} if modules else {}
    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    return {key: read[key] for key in read if key not in _NOT_KEPT} | {
        "architectures": [type(model).__name__],
        "dtype": "float32" if kinds == {gguf.GGMLQuantizationType.F32} else "bfloat16",
        "rope_parameters": _rope(reader, model.config),
        **quantized,
    }


def _rope(reader: gguf.GGUFReader, config: Any) -> dict[str, Any]:
    """rope_parameters with the file's scaling, which transformers does not read."""
    plain: dict[str, Any] = config.rope_parameters
    architecture = metadata_value(reader, "general.architecture")
    family = _family(reader)
    if family is not None and ROPE_FACTORS not in family.settings:
        return plain
    factors = [torch.tensor(tensor.data) for tensor in reader.tensors if tensor.name == ROPE_FACTORS]
    if not factors:
        return plain | rope_scaling(Metadata(reader, architecture))
    unscaled = plain["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    for high in _HIGH_FREQ_FACTORS:
        stated = {"rope_type": "llama3", "factor": float(factors[0].max()), "high_freq_factor": high}
        config.rope_parameters = plain | _LLAMA3_ROPE | stated
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        if torch.allclose(unscaled / factors[0], frequencies, rtol=1e-3):
            scaled: dict[str, Any] = config.rope_parameters
            return scaled
    raise ValueError("the GGUF's rotary frequency factors are not those of Llama 3 or 4: not supported")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
