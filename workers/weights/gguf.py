"""Expands a GGUF file into the Hugging Face form: config.json, safetensors, tokenizer.json.

The weights become float32, whatever the file packs them in; the engine rounds them to its
compute dtype when it loads them. Knows the tensor names and layouts of the families below;
needs neither torch nor transformers.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import save_file

from workers.weights.gguf_tokenizer import TokenizerFiles

MAX_SHARD_BYTES = 4 * 10**9

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Family:
    """`rotary_pairs`: the file keeps rotary halves as neighbouring pairs, which must be undone."""

    architecture: str
    model_type: str
    rotary_pairs: bool


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", rotary_pairs=True),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", rotary_pairs=False),
}

_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

# Llama 3.1 and later: a GGUF keeps the divisors of the frequencies only, these made them.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GGUFModel:
    """One opened GGUF file. Raises ValueError, in one line, for what cannot be expanded."""

    def __init__(self, path: Path):
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} is no readable GGUF file: {error}") from None
        self._name = path.name
        self._arch = self.value("general.architecture", "(none)")
        if self._arch not in FAMILIES:
            raise ValueError(
                f"{path.name} holds a model of kind {self._arch}; supported are {', '.join(FAMILIES)}"
            )
        self._family = FAMILIES[self._arch]
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._refuse_unsupported()

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value as a plain Python object."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        heads = self._number("attention.head_count")
        head_dim = int(self._setting("attention.key_length", self._number("embedding_length") // heads))
        vocab_size = int(self._tensors["token_embd.weight"].shape[1])
        return {
            "architectures": [self._family.architecture],
            "model_type": self._family.model_type,
            "dtype": self._natural_dtype(),
            "vocab_size": vocab_size,
            "hidden_size": self._number("embedding_length"),
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._setting("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": float(self._number("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": self._number("context_length"),
            "rope_parameters": self._rope(head_dim),
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
        }

    def save_weights(self, directory: Path, progress: Progress) -> None:
        """Write the tensors as float32 safetensors, in shards of at most MAX_SHARD_BYTES.

        `progress` is told tensors done and in all.
        """
        shards = list(self._shards())
        total = sum(map(len, shards))
        weight_map: dict[str, str] = {}
        for index, names in enumerate(shards):
            part = f"-{index + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            arrays: dict[str, np.ndarray] = {}
            for name in names:
                arrays[self._hf_name(name)] = self._expand(name)
                progress(len(weight_map) + len(arrays), total)
            file_name = f"model{part}.safetensors"
            save_file(arrays, directory / file_name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(arrays, file_name)
        if len(shards) > 1:
            index_file = directory / "model.safetensors.index.json"
            index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def _refuse_unsupported(self) -> None:
        if int(self.value("split.count", 1)) > 1:
            raise ValueError(
                f"{self._name} is one part of a split model; merge the parts into one file first"
            )
        if int(self._setting("expert_count", 0)) > 0:
            raise ValueError(f"{self._name} is a mixture of experts, which is not supported yet")
        if not isinstance(self._setting("attention.head_count_kv", 1), int):
            raise ValueError(f"{self._name} has layers with different numbers of KV heads: not supported")
        for name in self._tensors:
            if name != _ROPE_FACTORS:
                self._hf_name(name)

    def _setting(self, key: str, default: Any = None) -> Any:
        return self.value(f"{self._arch}.{key}", default)

    def _number(self, key: str) -> Any:
        value = self._setting(key)
        if value is None:
            raise ValueError(f"{self._name} has no {self._arch}.{key}")
        return value

    def _natural_dtype(self) -> str:
        """The dtype to compute in; quantized weights are meant for 16 bit arithmetic."""
        kinds = {tensor.tensor_type for tensor in self._reader.tensors if len(tensor.shape) > 1}
        if kinds == {GGMLQuantizationType.F32}:
            return "float32"
        return "float16" if kinds == {GGMLQuantizationType.F16} else "bfloat16"

    def _rope(self, head_dim: int) -> dict[str, Any]:
        rotated = int(self._setting("rope.dimension_count", head_dim))
        if rotated != head_dim:
            raise ValueError(f"{self._name} rotates {rotated} of {head_dim} dimensions: not supported yet")
        theta = float(self._setting("rope.freq_base", 10000.0))
        kind = self._setting("rope.scaling.type", "none")
        if _ROPE_FACTORS in self._tensors:
            factors = self._float32(_ROPE_FACTORS).reshape(-1)
            return llama3_rope(theta, head_dim, factors)
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        rope = {"rope_type": kind, "rope_theta": theta, "factor": float(self._number("rope.scaling.factor"))}
        original = self._setting("rope.scaling.original_context_length")
        return rope if original is None else {**rope, "original_max_position_embeddings": int(original)}

    def _shards(self) -> Iterator[list[str]]:
        names: list[str] = []
        size = 0
        for name, tensor in self._tensors.items():
            if name == _ROPE_FACTORS:
                continue
            expanded = 4 * int(tensor.n_elements)
            if names and size + expanded > MAX_SHARD_BYTES:
                yield names
                names, size = [], 0
            names.append(name)
            size += expanded
        yield names

    def _hf_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in _TENSORS:
            return f"{_TENSORS[stem]}.{suffix}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK_TENSORS:
            return f"model.layers.{parts[1]}.{_BLOCK_TENSORS[parts[2]]}.{suffix}"
        raise ValueError(f"{self._name} holds a tensor {name!r}, which no {self._arch} model has")

    def _expand(self, name: str) -> np.ndarray:
        array = self._float32(name)
        if self._family.rotary_pairs and name.split(".")[-2] in ("attn_q", "attn_k"):
            key = "attention.head_count" if ".attn_q." in name else "attention.head_count_kv"
            array = halves_from_pairs(array, int(self._setting(key, self._number("attention.head_count"))))
        return np.ascontiguousarray(array)

    def _float32(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        # A plain array: numpy's memory maps pay for every view, and dequantize makes many.
        packed = np.asarray(tensor.data)
        return dequantize(packed, tensor.tensor_type).astype(np.float32, copy=False)


def convert(path: Path, directory: Path, progress: Progress) -> None:
    """Expand the GGUF file at `path` into files in `directory`, which exists and is empty."""
    model = GGUFModel(path)
    config = model.config()
    tokenizer = TokenizerFiles(model.value, vocab_size=config["vocab_size"])
    tokenizer.save(directory)
    ids = tokenizer.special_ids()
    _write_json(directory / "config.json", {**config, **ids})
    _write_json(directory / "generation_config.json", {**ids, "eos_token_id": tokenizer.end_ids()})
    model.save_weights(directory, progress)


def halves_from_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection.

    Within a head, a GGUF puts the two dimensions that rotate together side by side; the
    Hugging Face form has all first ones in the first half, all second ones in the other.

        pairs   a0 b0 a1 b1 a2 b2      halves   a0 a1 a2 b0 b1 b2
    """
    rows = array.shape[0]
    pairs = array.reshape(heads, rows // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def llama3_rope(theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """The rope parameters whose frequency divisors are `factors`, one for each pair.

    Raises ValueError when they are not those of Llama 3.
    """
    factor = float(factors.max())
    low, high, original = _LLAMA3_ROPE.values()
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError("the rotary frequency factors are not those of Llama 3: not supported")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3_ROPE}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
