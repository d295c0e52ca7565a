"""Responses of /v1/messages, in Anthropic's format."""

from collections.abc import Iterator
from typing import Any

import msgspec

from frontend.api.generation.generate_request import GenerateRequest
from frontend.api.generation.reasons import INCOMPLETE
from frontend.api.messages.blocks import CALL, REASONING, Piece, pieces
from frontend.api.messages.errors import anthropic_error
from frontend.api.messages.schema import MessagesResponse, MessagesUsage
from frontend.api.schemas.generation import Usage
from frontend.errors import ApiError
from frontend.text.output_processor import SequenceOutput

__all__ = ["MessagesRenderer"]

_encode = msgspec.json.Encoder().encode


class MessagesRenderer:
    """Renders the response of one request: see Renderer."""

    def __init__(self, request: GenerateRequest):
        self._request = request
        self._index = -1
        """Index of the open content block."""
        self._kind: str | None = None
        """Its kind; None if none is open."""
        self._last: SequenceOutput | None = None

    def response(self, results: list[SequenceOutput], usage: Usage) -> MessagesResponse:
        (result,) = results
        return self._message([_block(piece) for piece in pieces(result)], result, _total(usage))

    def start(self) -> bytes:
        return b""

    def begin(self, index: int, update: SequenceOutput, usage: Usage | None) -> bytes:
        prompt = len(self._request.prompt(index).ids)
        cached = update.cached_tokens
        message = MessagesResponse(
            id=self._request.id,
            model=self._request.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessagesUsage(
                input_tokens=prompt - cached, cache_read_input_tokens=cached, output_tokens=0
            ),
            warnings=self._request.warnings or msgspec.UNSET,
        )
        return _event("message_start", message=message) + _event("ping")

    def delta(self, index: int, update: SequenceOutput, usage: Usage | None) -> bytes:
        self._last = update
        return b"".join(event for piece in pieces(update) for event in self._piece(piece))

    def end(self, usage: Usage) -> bytes:
        assert self._last is not None
        delta = {"stop_reason": _stop_reason(self._last), "stop_sequence": _stop_sequence(self._last)}
        ends = [
            *self._stop(),
            _event("message_delta", delta=delta, usage=_total(usage)),
            _event("message_stop"),
        ]
        return b"".join(ends)

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % anthropic_error(error)

    def _message(
        self, content: list[dict[str, Any]], end: SequenceOutput | None, usage: MessagesUsage
    ) -> MessagesResponse:
        return MessagesResponse(
            id=self._request.id,
            model=self._request.model,
            content=content,
            stop_reason=None if end is None else _stop_reason(end),
            stop_sequence=None if end is None else _stop_sequence(end),
            usage=usage,
            warnings=self._request.warnings or msgspec.UNSET,
        )

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        if piece.kind != self._kind or piece.call is not None:
            yield from self._stop()
            self._index += 1
            self._kind = piece.kind
            yield _event("content_block_start", index=self._index, content_block=_empty_block(piece))
        if piece.text:
            yield _event("content_block_delta", index=self._index, delta=_delta(piece))

    def _stop(self) -> Iterator[bytes]:
        if self._kind is not None:
            yield _event("content_block_stop", index=self._index)
        self._kind = None


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _empty_block(piece: Piece) -> dict[str, Any]:
    if piece.call is not None:
        return {"type": "tool_use", "id": piece.call.id, "name": piece.call.name, "input": {}}
    if piece.kind == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(piece: Piece) -> dict[str, str]:
    if piece.kind == CALL:
        return {"type": "input_json_delta", "partial_json": piece.text}
    if piece.kind == REASONING:
        return {"type": "thinking_delta", "thinking": piece.text}
    return {"type": "text_delta", "text": piece.text}


def _block(piece: Piece) -> dict[str, Any]:
    """A complete block."""
    block = _empty_block(piece)
    if piece.kind == CALL:
        return block | {"input": _arguments(piece.text)}
    return block | {"thinking" if piece.kind == REASONING else "text": piece.text}


def _arguments(text: str) -> dict[str, Any]:
    """The object in `text`; if the model wrote none, what it wrote."""
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def _stop_reason(result: SequenceOutput) -> str:
    if result.reason in INCOMPLETE:
        return "max_tokens"
    if result.called:
        return "tool_use"
    return "end_turn" if _stop_sequence(result) is None else "stop_sequence"


def _stop_sequence(result: SequenceOutput) -> str | None:
    return result.stop_reason if isinstance(result.stop_reason, str) else None


def _total(usage: Usage) -> MessagesUsage:
    return _usage(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=prompt_tokens - cached_tokens,
        cache_read_input_tokens=cached_tokens,
        output_tokens=output_tokens,
    )
