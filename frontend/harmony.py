"""The channels of Harmony, the response format of GPT-OSS.

    <|channel|>analysis<|message|>2 + 2 …<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>
               └header┘           └body─┘               └─────── header ────────┘           └body┘

Tags are single added tokens: text that only spells a tag is text.
"""

from enum import Enum

from atom.config.checkpoint import Checkpoint
from frontend.tokenizer import Tokenizer

__all__ = ["Channels", "Harmony"]

_MODEL_TYPE = "gpt_oss"
# Longer text without <|message|> is content, not a header.
_LONGEST_HEADER = 256


class _Tag(Enum):
    START = "<|start|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    MESSAGE = "<|message|>"
    END = "<|end|>"
    RETURN = "<|return|>"
    CALL = "<|call|>"


class Harmony:
    """The tag ids of one vocabulary."""

    def __init__(self, ids: dict[int, _Tag]):
        self._ids = ids

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> "Harmony | None":
        """None for checkpoints of other models."""
        if checkpoint.model_type != _MODEL_TYPE or tokenizer is None:
            return None
        ids = {tokenizer.added_id(tag.value): tag for tag in _Tag}
        return cls({token_id: tag for token_id, tag in ids.items() if token_id is not None})

    def channels(self) -> "Channels":
        """A parser for a new sequence."""
        return Channels(self._ids)


class Channels:
    """Separates the text of one sequence into content and reasoning.

    The analysis channel and messages to tools are reasoning. Text that does not follow the
    format is content.
    """

    __slots__ = ("_header", "_is_reasoning", "_tags")

    def __init__(self, tags: dict[int, _Tag]):
        self._tags = tags
        self._header: str | None = None
        """The header so far, its channel on a line of its own; None outside a header."""
        self._is_reasoning = False

    def split(self, token_id: int, text: str) -> tuple[str, str]:
        """(content, reasoning) of `text`, which `token_id` completed; at least one is empty."""
        if (tag := self._tags.get(token_id)) is not None:
            self._apply(tag)
            return "", ""
        if self._header is None:
            return self.split_rest(text)
        self._header += text
        if len(self._header) <= _LONGEST_HEADER:
            return "", ""
        text, self._header = self._header.removeprefix("\n"), None
        return text, ""

    def split_rest(self, text: str) -> tuple[str, str]:
        """(content, reasoning) of text that follows no tag."""
        if self._header is not None:
            return "", ""
        return ("", text) if self._is_reasoning else (text, "")

    def _apply(self, tag: _Tag) -> None:
        header, self._header, self._is_reasoning = self._header, None, False
        if tag is _Tag.START:
            self._header = ""
        elif tag in (_Tag.CHANNEL, _Tag.CONSTRAIN):
            self._header = (header or "") + ("\n" if tag is _Tag.CHANNEL else " ")
        elif tag is _Tag.MESSAGE and header is not None:
            channel = header.rpartition("\n")[2].split()[:1]
            self._is_reasoning = channel == ["analysis"] or "to=" in header
