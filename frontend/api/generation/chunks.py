"""OpenAI's choices and chunks; chunks come from a template that is rendered once per stream.

Only the escaped text varies from event to event:

    data: {"id":…,"choices":[{"index":0,"delta":{"content":   "text"   },"finish_reason":null}]}
    └────────────────────── head ──────────────────────────┘           └──────── tail ────────┘
"""

from array import array
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from frontend.api.generation.generate_request import GenerateRequest
from frontend.api.generation.reasons import openai_reason
from frontend.api.schemas.generation import Usage
from frontend.errors import ApiError
from frontend.text.output_processor import SequenceOutput
from frontend.text.token_logprobs import TokenLogprob

__all__ = ["ChunkForm", "ChunkRenderer"]

_DONE = b"data: [DONE]\n\n"
_MARK = "\0"  # replaces the text while a template is rendered; JSON escapes it uniquely

_encode = msgspec.json.Encoder().encode
_escaped_mark = _encode(_MARK)


class ChunkForm(Protocol):
    """In what the responses of the endpoints with choices differ."""

    chunk_object: ClassVar[str]

    def response(self, results: list[SequenceOutput], usage: Usage) -> msgspec.Struct:
        """The complete response."""

    def delta(self, update: SequenceOutput) -> dict[str, Any]:
        """The part of a choice that contains the new text, for example {"text": …}."""

    def logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> msgspec.Struct:
        """Log probabilities of tokens of choice `index`."""

    def first_choice(
        self, index: int, update: SequenceOutput
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """(the choice before the first text, further fields of its chunk); None for no such chunk."""


class ChunkRenderer:
    """Renders the response of one request: see Renderer."""

    def __init__(self, request: GenerateRequest, form: ChunkForm):
        self._request = request
        self._form = form
        self._parts = [self._split(index) for index in range(len(request.request_ids))]

    def response(self, results: list[SequenceOutput], usage: Usage) -> msgspec.Struct:
        return self._form.response(results, usage)

    def start(self) -> bytes:
        return b""

    def begin(self, index: int, update: SequenceOutput, usage: Usage | None) -> bytes:
        first = self._form.first_choice(index, update)
        return b"" if first is None else self._frame([first[0]], usage, **first[1])

    def delta(self, index: int, update: SequenceOutput, usage: Usage | None) -> bytes:
        if self._request.options.details:
            return self._detailed(index, update, usage)
        if update.finished or update.reasoning or update.calls:
            return self._frame([self._choice(index, update)])
        if not update.text:
            return b""
        head, tail = self._parts[index]
        return b"%b%b%b" % (head, _encode(update.text), tail)

    def end(self, usage: Usage) -> bytes:
        return (self._frame([], usage) if self._request.options.usage else b"") + _DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % error.body() + _DONE

    def _detailed(self, index: int, update: SequenceOutput, usage: Usage | None) -> bytes:
        """A chunk with more than text; empty if `update` has nothing to show."""
        options = self._request.options
        shows_ids = bool(options.token_ids and update.token_ids)
        shows_text = update.text or update.reasoning or update.calls
        if not (update.finished or shows_text or update.logprobs or shows_ids):
            return b""
        choice = self._choice(index, update)
        if update.logprobs:
            choice["logprobs"] = self._form.logprobs(index, update.logprobs)
        if options.token_ids:
            choice["token_ids"] = update.token_ids.tolist()
        return self._frame([choice], usage)

    def _frame(self, choices: list[dict[str, Any]], usage: Usage | None = None, **more: Any) -> bytes:
        """A chunk rendered in full; `more` are further fields of it."""
        request = self._request
        chunk: dict[str, Any] = {
            "id": request.id,
            "object": self._form.chunk_object,
            "created": request.created,
            "model": request.model,
            "system_fingerprint": request.fingerprint,
            "choices": choices,
        }
        if request.options.usage or usage is not None:
            chunk["usage"] = usage
        if request.warnings:
            chunk["warnings"] = request.warnings
        return b"data: %b\n\n" % _encode(chunk | more)

    def _choice(self, index: int, update: SequenceOutput) -> dict[str, Any]:
        reason = None if update.reason is None else openai_reason(update.reason, update.called)
        choice = {"index": index, **self._form.delta(update), "logprobs": None, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = update.stop_reason
            choice["raw_finish_reason"] = update.reason
        return choice

    def _split(self, index: int) -> tuple[bytes, bytes]:
        marked = self._frame([self._choice(index, SequenceOutput(0, array("i"), _MARK))])
        head, _, tail = marked.partition(_escaped_mark)
        return head, tail
