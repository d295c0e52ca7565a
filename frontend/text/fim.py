"""Fill in the middle: prompts with a text before the output and one after it."""

from collections.abc import Callable
from typing import NamedTuple

from frontend.text.tokenizer import Tokenizer

__all__ = ["FillInTheMiddle"]


class _Family(NamedTuple):
    """Markers in the order in which the prompt has them; its last one begins the output."""

    prefix: str
    suffix: str
    middle: str | None
    end: str | None = None
    """A token that ends the output, besides the model's own."""


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),  # CodeLlama
    _Family("[PREFIX]", "[SUFFIX]", None),  # Codestral: the suffix comes first
)
_LETTER = "a"


class FillInTheMiddle:
    """The markers of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, family: _Family):
        self._strips = bool(tokenizer.leading_strip[1])
        self._ids = [None if text is None else tokenizer.added_id(text) for text in family]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> "FillInTheMiddle | None":
        """None for a tokenizer without such markers."""
        if tokenizer is None:
            return None
        for family in _FAMILIES:
            if all(text is None or tokenizer.added_id(text) is not None for text in family[:3]):
                return cls(tokenizer, family)
        return None

    @property
    def stop_token_ids(self) -> list[int]:
        """What ends the output, besides the model's own tokens."""
        return [self._ids[3]] if self._ids[3] is not None else []

    def prompt(self, prefix: str, suffix: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a prompt whose output stands between the two; `encode` adds no special tokens."""
        before, after, middle, _ = self._ids
        assert before is not None and after is not None
        if middle is None:
            return [after, *self._continued(suffix, encode), before, *encode(prefix)]
        return [before, *encode(prefix), after, *self._continued(suffix, encode), middle]

    def _continued(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of a text that is not the beginning of one: some tokenizers put a space before those."""
        return encode(_LETTER + text)[len(encode(_LETTER)) :] if self._strips else encode(text)
