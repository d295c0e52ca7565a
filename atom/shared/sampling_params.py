"""Sampling parameters of one request."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

SEED_LIMIT = 1 << 64
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256

MAX_CHOICES = 4096

_MAX_ID = (1 << 31) - 1


@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must be: exactly one of the first six fields is set.

    Raises ValueError for none or several of them.
    """

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    """The whole output matches it."""
    choice: list[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in xgrammar's EBNF; its rule `root` is the output."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """One of xgrammar's structural tags, or its text."""
    disable_any_whitespace: bool = False
    """JSON is written without line breaks and indentation."""

    def __post_init__(self) -> None:
        named = [one.name for one in fields(self)[:6]]
        given = [name for name in named if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs needs exactly one of {', '.join(named)}, not "
                f"{' and '.join(given) or 'none'}"
            )
        if self.choice is not None and not 1 <= len(self.choice) <= MAX_CHOICES:
            raise ValueError(f"structured_outputs needs 1 to {MAX_CHOICES} choices, not {len(self.choice)}")
        if not all(isinstance(text, str) and text for text in self.choice or ()):
            raise ValueError("structured_outputs has a choice that is empty or no text")


@dataclass(slots=True)
class SamplingParams:
    """Sampling and stopping of one request; every field is checked here, once.

    Raises ValueError naming the field for a value outside its range. Limits that
    depend on the model, such as the vocabulary, are checked when the request is submitted.
    """

    temperature: float = 1.0
    """0 takes the most likely token; larger is more random."""
    max_tokens: int = 64
    """Tokens to generate at most."""
    ignore_eos: bool = False
    """Continue past the end-of-sequence token."""
    stop_strings: list[str] | None = None
    """End before the first of these appears in the text; it is not part of the result."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least this."""
    top_k: int = -1
    """Keep this many most likely tokens; -1 or 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    seed: int | None = None
    """Makes sampling repeatable; chosen at random when absent."""
    n: int = 1
    """Independent sequences for the same prompt."""
    priority: int = 0
    """Smaller runs first under `--scheduling-policy priority`."""
    stop_token_ids: list[int] | None = None
    """End with the first of these ids; it is not part of the text."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of generated ids; negative values favour them."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of an id for each time it was generated."""
    repetition_penalty: float = 1.0
    """Above 1 makes ids of the prompt and the output less likely, below 1 more."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these ids."""
    min_tokens: int = 0
    """Neither end-of-sequence nor stop ids nor stop strings end the text before this many tokens."""
    bad_words: list[str] | None = None
    """Words that may not be generated, with or without a space before them.

    Their token sequences are excluded.
    """
    allowed_token_ids: list[int] | None = None
    """Only these ids may be generated."""
    logprobs: int | None = None
    """Report the log probability of each token and of this many of the most likely ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the text, or the text of the stop id."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output must be; None: any text."""
    skip_special_tokens: bool = True
    """Leave special tokens such as end-of-turn marks out of the text."""

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_integer("top_k", self.top_k, -1, _MAX_ID)
        _require_integer("max_tokens", self.max_tokens, 1, 1 << 31)
        _require_integer("n", self.n, 1, 128)
        _require_integer("priority", self.priority, -(1 << 31), 1 << 31)
        if self.seed is not None:
            # OpenAI's seeds are signed 64 bit; unsigned ones come from other engines.
            _require_integer("seed", self.seed, -(1 << 63), SEED_LIMIT - 1)
        self._check_ends()
        self._check_logits()
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _require_integer(name, count, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")

    def _check_ends(self) -> None:
        for text in self.stop_strings or ():
            if not isinstance(text, str) or not text:
                raise ValueError("stop_strings must be non-empty strings")
        _require_at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        for token_id in self.stop_token_ids or ():
            _require_integer("stop_token_ids", token_id, 0, _MAX_ID)
        _require_integer("min_tokens", self.min_tokens, 0, self.max_tokens)

    def _check_logits(self) -> None:
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _require_at_most("logit_bias", self.logit_bias, MAX_BIASES)
        for token_id, bias in (self.logit_bias or {}).items():
            _require_integer("logit_bias", token_id, 0, _MAX_ID)
            _require_number("logit_bias", bias, -100.0, 100.0)
        _require_at_most("bad_words", self.bad_words, MAX_BAD_WORDS)
        for word in self.bad_words or ():
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
                raise ValueError(
                    f"bad_words must be texts of 1 to {MAX_BAD_WORD_LENGTH} characters, not only spaces"
                )
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty: no token could be generated")
            for token_id in self.allowed_token_ids:
                _require_integer("allowed_token_ids", token_id, 0, _MAX_ID)


def _require_number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not valid or not _is_finite(value):  # type: ignore[arg-type]
        raise ValueError(f"{name} must be a finite number, not {value!r:.40}")
    if not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}], not {value!r}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _require_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], not {value}")


def _require_at_most(name: str, values: Collection[object] | None, most: int) -> None:
    if values is not None and len(values) > most:
        raise ValueError(f"{name} has {len(values)} entries, at most {most} are allowed")
