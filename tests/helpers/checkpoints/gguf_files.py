"""Tiny GGUF files of any architecture, as llama.cpp writes them, with tensors of any type."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

Type = gguf.GGMLQuantizationType
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "hi", "12", "ĠĠ", "<|bos|>", "<|end|>"]
_SCALES_AT = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
}
"""Where a block has its float16 numbers; elsewhere at its start."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    hidden: int = 32
    ffn: int = 64
    layers: int = 1


SMALL = Sizes()
_ROTATES_NEIGHBOURS = ("llama", "granite", "smollm3", "mistral3")
_NAMES_OF = {"deepseek32": "glm-dsa"}
"""Architectures with the names of another one, which gguf does not know."""
_ADDS_ONE = ("gemma2", "gemma3")
"""Architectures whose norms are stored with 1 added."""


def hf_weights(tied: bool = False, sizes: Sizes = SMALL, kind: str = "llama") -> dict[str, np.ndarray]:
    """Random weights of the architecture `kind` under their Hugging Face names."""
    random = np.random.default_rng(0)
    hidden, ffn = sizes.hidden, sizes.ffn
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), hidden),
        "model.norm.weight": (hidden,),
        **({} if tied else {"lm_head.weight": (len(TOKENS), hidden)}),
    }
    for number in range(sizes.layers):
        layer = f"model.layers.{number}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (q, hidden),
            layer + "self_attn.k_proj.weight": (kv, hidden),
            layer + "self_attn.v_proj.weight": (kv, hidden),
            layer + "self_attn.o_proj.weight": (hidden, q),
            layer + "mlp.gate_proj.weight": (ffn, hidden),
            layer + "mlp.up_proj.weight": (ffn, hidden),
            layer + "mlp.down_proj.weight": (hidden, ffn),
        }
        attention = layer + "self_attn."
        if kind == "qwen2":
            shapes |= {f"{attention}{each}_proj.bias": (q if each == "q" else kv,) for each in "qkv"}
        if kind == "qwen3":
            shapes |= {f"{attention}{each}_norm.weight": (sizes.head_dim,) for each in "qk"}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def random_blocks(shape: tuple[int, int], kind: Type, std: float, seed: int) -> np.ndarray:
    """A quantized tensor [O, I] in the file's bytes, of random blocks, with numbers of about `std`."""
    random = np.random.default_rng(seed)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // per_block, size), dtype=np.uint8)
    for at in _SCALES_AT.get(kind.name, (0,)):
        scales = (0.5 + random.random((len(blocks), 1))).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    factor = std / gguf.quants.dequantize(blocks, kind).std()
    for at in _SCALES_AT.get(kind.name, (0,)):
        scales = blocks[:, at : at + 2].copy().view(np.float16) * np.float16(factor)
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(
    path: Path,
    weights: Mapping[str, np.ndarray],
    kind: str = "llama",
    types: Mapping[str, Type] | Type | None = None,
    sizes: Sizes = SMALL,
    tensors_per_part: int = 0,
    **more: Any,
) -> None:
    """A file with these weights, or parts with some of the tensors each, as llama.cpp names them.

    `types`: of quantized matrices; K- and I-quants have random blocks. `more`: methods of GGUFWriter.
    """
    known = _NAMES_OF.get(kind, kind)
    architecture = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == known), None)
    names = gguf.get_tensor_name_map(architecture or gguf.MODEL_ARCH.LLAMA, sizes.layers + 1)
    if kind in _ROTATES_NEIGHBOURS:
        weights = {name: _as_in_file(name, array, sizes) for name, array in weights.items()}
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=tensors_per_part)
    writer.add_block_count(sizes.layers)
    writer.add_context_length(512)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(sizes.ffn)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["h i", "1 2", "Ġ Ġ"])
    writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 3])
    writer.add_bos_token_id(TOKENS.index("<|bos|>"))
    writer.add_eos_token_id(TOKENS.index("hi"))
    writer.add_eot_token_id(TOKENS.index("<|end|>"))
    writer.add_chat_template("{{ messages }}")
    for key, value in more.items():
        getattr(writer, key)(value)
    if kind in _ADDS_ONE:
        weights = {name: array + np.float32(name.endswith("norm.weight")) for name, array in weights.items()}
    for name, array in weights.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        wanted = types.get(name) if isinstance(types, Mapping) else types
        if wanted is not None and array.ndim > 1:
            writer.add_tensor(stored, _quantized(array, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantized(array: np.ndarray, kind: Type) -> np.ndarray:
    if kind.name.endswith("_K") or kind.name.startswith("IQ"):
        *outputs, inputs = array.shape
        rows = math.prod(outputs)
        blocks = random_blocks((rows, inputs), kind, float(array.std()), seed=rows + inputs)
        return blocks.reshape(*outputs, -1)
    found: np.ndarray = gguf.quants.quantize(array, kind)
    return found


def _as_in_file(name: str, array: np.ndarray, sizes: Sizes) -> np.ndarray:
    """With the order of rows in a GGUF file."""
    if ".q_proj" not in name and ".k_proj" not in name:
        return array
    made = np.empty_like(array)
    dim = sizes.head_dim
    for head in range(sizes.heads if ".q_proj" in name else sizes.kv_heads):
        for i in range(dim // 2):
            made[head * dim + 2 * i] = array[head * dim + i]
            made[head * dim + 2 * i + 1] = array[head * dim + dim // 2 + i]
    return made
