"""What transformers leaves out of the tokenizer of a GGUF file, by the name of its pre-tokenizer."""

from typing import Any

import gguf
from tokenizers import Regex, normalizers, pre_tokenizers

from workers.checkpoint.byte_pairs import KIMI_PATTERN
from workers.weights.gguf_families import metadata_value

__all__ = ["WITH_BOS", "complete_tokenizer"]

WITH_BOS = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
)
"""Pre-tokenizers whose words that are tokens are not split, and that begin prompts with the BOS token."""
_GPT2 = ("default", "gpt-2")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
_NFC = ("qwen2", "qwen35")
# Architectures whose SentencePiece tokenizers put no space before a text.
_WITHOUT_PREFIX = ("gemma2", "gemma3")
_GLM = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "glm4": (_GLM,),
    "chatglm-bpe": (_GLM,),
    "deepseek-v3": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_WORDS),
    "kimi-k2": (KIMI_PATTERN,),
}
"""Expressions that cut a text one after the other, which transformers does not know by these names."""


def complete_tokenizer(backend: Any, reader: gguf.GGUFReader, pre_tokenizer: str) -> None:
    """Set what is left out for this `pre_tokenizer` (tokenizer.ggml.pre). Raises ValueError for others."""
    if metadata_value(reader, "tokenizer.ggml.model") != "gpt2":
        stated = bool(metadata_value(reader, "tokenizer.ggml.add_space_prefix", True))
        if stated == (metadata_value(reader, "general.architecture") in _WITHOUT_PREFIX):
            raise ValueError(f"add_space_prefix = {str(stated).lower()} is not supported")
        return
    if pre_tokenizer in _SINGLE_DIGITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre_tokenizer in _SPLITS:
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in _SPLITS[pre_tokenizer]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        backend.model.ignore_merges = pre_tokenizer == "kimi-k2"
    elif pre_tokenizer in _NFC:
        backend.normalizer = normalizers.NFC()
    elif pre_tokenizer in WITH_BOS:
        backend.model.ignore_merges = True
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and pre_tokenizer not in _GPT2:
        raise ValueError(f"its pre-tokenizer {pre_tokenizer!r} is not supported")
