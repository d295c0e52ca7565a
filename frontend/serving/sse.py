"""Server-sent events of a token stream, from a template that is rendered once per stream.

Only the escaped text varies from frame to frame:

    data: {"id":…,"choices":[{"index":0,"delta":{"content":   "text"   },"finish_reason":null}]}
    └────────────────────── head ──────────────────────────┘           └──────── tail ────────┘
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.output_processor import Update
from frontend.schemas.generation import Usage
from frontend.serving.reasons import openai_reason

__all__ = ["DONE", "ChunkHeader", "ChunkShape", "ChunkTemplate", "error_frame"]

DONE = b"data: [DONE]\n\n"
_MARK = "\0"  # replaces the text while a template is rendered; JSON escapes it uniquely

_encode = msgspec.json.Encoder().encode
_escaped_mark = _encode(_MARK)

ChunkShape = Callable[[Update], dict[str, Any]]
"""The part of a choice that contains the new text, for example {"text": …}."""


@dataclass(frozen=True)
class ChunkHeader:
    """The fields that all chunks of one stream share."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str
    warnings: list[str]
    include_usage: bool

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        """One chunk in OpenAI's form."""
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        if self.include_usage or usage is not None:
            chunk["usage"] = usage
        if self.warnings:
            chunk["warnings"] = self.warnings
        return chunk


class ChunkTemplate:
    """Renders the frames of one stream with `choices` choices."""

    def __init__(self, header: ChunkHeader, choices: int, shape: ChunkShape):
        self._header = header
        self._shape = shape
        self._parts = [self._split(index) for index in range(choices)]

    def text(self, index: int, text: str) -> bytes:
        """A frame with new text of one choice."""
        head, tail = self._parts[index]
        return b"%b%b%b" % (head, _encode(text), tail)

    def update(self, index: int, update: Update) -> bytes:
        """A frame with one update, including a finish reason."""
        return self.frame([self.choice(index, update)])

    def choice(self, index: int, update: Update) -> dict[str, Any]:
        """The `choices` entry of one update; the caller may add fields to it."""
        if update.reason is None:
            return self._choice(index, update, None)
        choice = self._choice(index, update, openai_reason(update.reason, update.called))
        choice["stop_reason"] = update.stop_reason
        choice["raw_finish_reason"] = update.reason
        return choice

    def usage(self, usage: Usage) -> bytes:
        """The last frame: usage, no choices."""
        return self.frame([], usage)

    def frame(self, choices: list[dict[str, Any]], usage: Usage | None = None, **more: Any) -> bytes:
        """A chunk rendered in full; `more` are further fields of it."""
        return b"data: %b\n\n" % _encode(self._header.chunk(choices, usage) | more)

    def _choice(self, index: int, update: Update, reason: str | None) -> dict[str, Any]:
        return {"index": index, **self._shape(update), "logprobs": None, "finish_reason": reason}

    def _split(self, index: int) -> tuple[bytes, bytes]:
        marked = Update(0, array("i"), _MARK)
        head, _, tail = self.frame([self._choice(index, marked, None)]).partition(_escaped_mark)
        return head, tail


def error_frame(body: bytes) -> bytes:
    """An error object inside a stream; only DONE follows."""
    return b"data: %b\n\n" % body
