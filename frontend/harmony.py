"""The channels of harmony, the format that GPT-OSS replies in.

    <|channel|>analysis<|message|>2 + 2 …<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>
               └header┘           └body─┘               └─────── header ────────┘           └body┘

Tags are tokens of their own: a text that only looks like one, as in a reply about the format,
is text.
"""

from enum import Enum

from atom.config.checkpoint import Checkpoint
from frontend.tokenizer import Tokenizer

__all__ = ["Channels", "Harmony"]

_MODEL_TYPE = "gpt_oss"
# What is longer is no header: some words of text that lack theirs.
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
    """The tags of one vocabulary."""

    def __init__(self, ids: dict[int, _Tag]):
        self._ids = ids

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> "Harmony | None":
        """None for a checkpoint that replies in plain text."""
        if checkpoint.model_type != _MODEL_TYPE or tokenizer is None:
            return None
        ids = {tokenizer.added_id(tag.value): tag for tag in _Tag}
        return cls({token_id: tag for token_id, tag in ids.items() if token_id is not None})

    def channels(self) -> "Channels":
        """For a new choice."""
        return Channels(self._ids)


class Channels:
    """Sorts the text of one choice into what the user reads and the reasoning that led to it.

    Reasoning is the analysis channel, and what is said to a tool. Whatever does not keep to the
    format is for the user.
    """

    __slots__ = ("_header", "_reasons", "_tags")

    def __init__(self, tags: dict[int, _Tag]):
        self._tags = tags
        self._header: str | None = None
        """So far, with a line for its channel; None outside of one."""
        self._reasons = False

    def sort(self, token_id: int, text: str) -> tuple[str, str]:
        """(content, reasoning) of what `token_id` completed: one or the other, or nothing."""
        if (tag := self._tags.get(token_id)) is not None:
            self._pass(tag)
            return "", ""
        if self._header is None:
            return self.rest(text)
        self._header += text
        if len(self._header) <= _LONGEST_HEADER:
            return "", ""
        text, self._header = self._header.removeprefix("\n"), None
        return text, ""

    def rest(self, text: str) -> tuple[str, str]:
        """(content, reasoning) of text that no further id completes."""
        if self._header is not None:
            return "", ""
        return ("", text) if self._reasons else (text, "")

    def _pass(self, tag: _Tag) -> None:
        header, self._header, self._reasons = self._header, None, False
        if tag is _Tag.START:
            self._header = ""
        elif tag in (_Tag.CHANNEL, _Tag.CONSTRAIN):
            self._header = (header or "") + ("\n" if tag is _Tag.CHANNEL else " ")
        elif tag is _Tag.MESSAGE and header is not None:
            channel = header.rpartition("\n")[2].split()[:1]
            self._reasons = channel == ["analysis"] or "to=" in header
