"""Builds tokenizer.json and its companions from the vocabulary inside a GGUF file.

A GGUF names its way of cutting text into words (`tokenizer.ggml.pre`) instead of spelling it
out; the table below spells out those of the model families that run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_SPACE = "\u2581"


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _word_pattern(number: str) -> str:
    """How Llama 3 and Qwen cut text; they differ in how many digits make a word."""
    contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    letters = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    symbols = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return "|".join([contraction, letters, number, symbols, r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _words(_word_pattern(r"\p{N}{1,3}"))


def _qwen() -> pre_tokenizers.PreTokenizer:
    return _words(_word_pattern(r"\p{N}"))


PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "qwen2": _qwen,
}
_LLAMA3_NAMES = ("llama-bpe", "llama3")


class TokenizerFiles:
    """The tokenizer of one GGUF file; `value(key, default)` reads its metadata.

    Raises ValueError, in one line, for a kind of tokenizer that is not known.
    """

    def __init__(self, value: Callable[..., Any], vocab_size: int):
        self._value = value
        self._kind = self._setting("model", "(none)")
        self._pre = self._setting("pre", "default")
        self._tokens: list[str] = self._setting("tokens", [])
        self._types: list[int] = self._setting("token_type") or [TokenType.NORMAL] * len(self._tokens)
        if self._kind not in ("gpt2", "llama"):
            raise ValueError(f"the GGUF's tokenizer is of kind {self._kind}; supported are gpt2 and llama")
        if self._kind == "gpt2" and self._pre not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise ValueError(f"the GGUF's tokenizer cuts words as {self._pre!r}; supported are {known}")
        if len(self._tokens) > vocab_size:
            raise ValueError(f"the GGUF names {len(self._tokens)} tokens, but its model has {vocab_size}")

    def save(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, where there is one, the chat template."""
        self.tokenizer.save(str(directory / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._adds_bos(),
            **{f"{role}_token": self._tokens[index] for role, index in self._roles().items()},
        }
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
        if template := self._value("tokenizer.chat_template", ""):
            (directory / "chat_template.jinja").write_text(template, encoding="utf-8")

    def special_ids(self) -> dict[str, int]:
        """bos_token_id, eos_token_id, pad_token_id: those that the file names."""
        return {f"{role}_token_id": index for role, index in self._roles().items() if role != "unk"}

    def end_ids(self) -> list[int]:
        """Ids that end an answer: of the text, of the turn and of a message."""
        named = [self._setting(f"{role}_token_id") for role in ("eos", "eot", "eom")]
        return list(dict.fromkeys(int(index) for index in named if index is not None))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The whole pipeline: normalizing, cutting, merging, framing, decoding."""
        made = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        made.add_special_tokens([self._added(index, True) for index in self._of_type(TokenType.CONTROL)])
        made.add_tokens([self._added(index, False) for index in self._of_type(TokenType.USER_DEFINED)])
        if self._adds_bos():
            bos = self._tokens[self._roles()["bos"]]
            made.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"],
                pair=[bos, "$A", bos, "$B:1"],
                special_tokens=[(bos, self._roles()["bos"])],
            )
        return made

    def _byte_level(self) -> Tokenizer:
        merges = [tuple(merge.split(" ", 1)) for merge in self._setting("merges", [])]
        model = models.BPE(vocab=self._vocabulary(), merges=merges, ignore_merges=self._pre in _LLAMA3_NAMES)
        made = Tokenizer(model)
        if self._pre == "qwen2":
            made.normalizer = normalizers.NFC()
        made.pre_tokenizer = PRE_TOKENIZERS[self._pre]()
        made.decoder = decoders.ByteLevel()
        return made

    def _sentencepiece(self) -> Tokenizer:
        vocabulary = self._vocabulary()
        made = Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=merges_from_scores(vocabulary, self._setting("scores", [])),
                unk_token=self._tokens[int(self._setting("unknown_token_id", 0))],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = bool(self._setting("add_space_prefix", True))
        spaces = normalizers.Replace(" ", _SPACE)
        made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces] if prefix else [spaces])
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        return made

    def _setting(self, key: str, default: Any = None) -> Any:
        return self._value(f"tokenizer.ggml.{key}", default)

    def _vocabulary(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self._tokens)}

    def _roles(self) -> dict[str, int]:
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = {role: self._setting(f"{key}_token_id") for role, key in keys.items()}
        return {role: int(index) for role, index in found.items() if index is not None}

    def _adds_bos(self) -> bool:
        usual = self._kind == "llama" or self._pre in _LLAMA3_NAMES
        return bool(self._setting("add_bos_token", usual)) and "bos" in self._roles()

    def _of_type(self, wanted: TokenType) -> list[int]:
        return [index for index, kind in enumerate(self._types) if kind == wanted]

    def _added(self, index: int, special: bool) -> AddedToken:
        return AddedToken(self._tokens[index], normalized=False, special=special)


def merges_from_scores(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies, best first.

    SentencePiece joins the neighbours whose union scores best; any two pieces whose union is
    in the vocabulary are such a pair.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
