"""Responses of /v1/responses, in OpenAI's format: items, complete or as events."""

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frontend.api.generation.generate_request import GenerateRequest
from frontend.api.generation.reasons import INCOMPLETE
from frontend.api.messages.blocks import CALL, REASONING, Piece, pieces
from frontend.api.responses.response_store import StoredResponse, joined_lists
from frontend.api.responses.schema import Response, ResponseUsage
from frontend.api.schemas.generation import Usage
from frontend.errors import ApiError
from frontend.text.output_processor import SequenceOutput

__all__ = ["ResponseEcho", "ResponsesRenderer"]

_IN_PROGRESS = "in_progress"
_COMPLETED = "completed"
_INCOMPLETE = "incomplete"
_FAILED = "failed"
_ID_PREFIXES = {REASONING: "rs_", CALL: "fc_"}
_EVENTS = {REASONING: "reasoning_text", CALL: "function_call_arguments"}

_encode = msgspec.json.Encoder().encode


@dataclass(kw_only=True)
class ResponseEcho:
    """What a response repeats of its request, and how it is kept."""

    instructions: msgspec.Raw
    max_output_tokens: int | None
    metadata: msgspec.Raw
    parallel_tool_calls: bool
    previous_response_id: str | None
    effort: str | None
    store: bool
    temperature: float | None
    text: msgspec.Raw
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    top_p: float | None
    shows_encrypted: bool
    """Whether reasoning items have `encrypted_content`."""
    custom_tools: set[str] = field(default_factory=set)
    """Names of tools whose calls have a text as `input` instead of arguments."""
    keep: Callable[[str, StoredResponse], None] | None = None
    """Stores a response under its id."""
    items: bytes = b"[]"
    """The conversation before the response as a JSON list, if it is kept."""


@dataclass
class _OpenItem:
    """The item that the model writes."""

    piece: Piece
    """The first piece of the item."""
    id: str
    text: io.StringIO


class ResponsesRenderer:
    """Renders the response of one request: see Renderer."""

    def __init__(self, request: GenerateRequest, echo: ResponseEcho):
        self._request = request
        self._echo = echo
        self._number = 0
        """Number of the next event."""
        self._items: list[dict[str, Any]] = []
        """The items that are complete."""
        self._open: _OpenItem | None = None
        self._is_incomplete = False

    def response(self, results: list[SequenceOutput], usage: Usage) -> msgspec.Raw:
        (result,) = results
        self._is_incomplete = result.reason in INCOMPLETE
        found = list(pieces(result))
        for piece in found:
            is_cut = self._is_incomplete and piece is found[-1]
            text = _custom_input(piece.text) if self._is_custom(piece) else piece.text
            status = _INCOMPLETE if is_cut else _COMPLETED
            self._items.append(self._item(self._item_id(piece), piece, text, status))
        return self._finished(usage)

    def start(self) -> bytes:
        created = self._object(_IN_PROGRESS)
        return self._event("created", response=created) + self._event("in_progress", response=created)

    def begin(self, index: int, update: SequenceOutput, usage: Usage | None) -> bytes:
        return b""

    def delta(self, index: int, update: SequenceOutput, usage: Usage | None) -> bytes:
        self._is_incomplete = update.reason in INCOMPLETE
        return b"".join(event for piece in pieces(update) for event in self._piece(piece))

    def end(self, usage: Usage) -> bytes:
        status = _INCOMPLETE if self._is_incomplete else _COMPLETED
        return b"".join(self._close(status)) + self._event(status, response=self._finished(usage))

    def error(self, error: ApiError) -> bytes:
        info = {"code": "server_error", "message": error.message}
        return self._event(_FAILED, response=self._object(_FAILED, error=info))

    def _finished(self, usage: Usage) -> msgspec.Raw:
        """The complete response, which is kept."""
        details = usage.completion_tokens_details
        reasoning = 0 if details is msgspec.UNSET else details.reasoning_tokens
        counts = ResponseUsage.of(
            usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens, reasoning
        )
        cut = {"incomplete_details": {"reason": "max_output_tokens"}} if self._is_incomplete else {}
        body = _encode(self._object(_INCOMPLETE if cut else _COMPLETED, usage=counts, **cut))
        if self._echo.keep is not None:
            items = joined_lists(self._echo.items, _encode(self._items))
            self._echo.keep(self._request.id, StoredResponse(body, items))
        return msgspec.Raw(body)

    def _object(self, status: Any, **more: Any) -> Response:
        request = self._request
        echo = self._echo
        return Response(
            id=request.id,
            created_at=request.created,
            status=status,
            instructions=echo.instructions,
            max_output_tokens=echo.max_output_tokens,
            metadata=echo.metadata,
            model=request.model,
            output=self._items,
            parallel_tool_calls=echo.parallel_tool_calls,
            previous_response_id=echo.previous_response_id,
            reasoning={"effort": echo.effort, "summary": None},
            store=echo.store,
            temperature=echo.temperature,
            text=echo.text,
            tool_choice=echo.tool_choice,
            tools=echo.tools,
            top_p=echo.top_p,
            warnings=request.warnings or msgspec.UNSET,
            **more,
        )

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        if self._open is None or piece.kind != self._open.piece.kind or piece.call is not None:
            yield from self._close(_COMPLETED)
            yield from self._begin(piece)
        assert self._open is not None
        if piece.text:
            self._open.text.write(piece.text)
            if not self._is_custom(self._open.piece):  # its input is read from complete arguments
                yield self._part_event("delta", delta=piece.text, **_logprobs(piece.kind))

    def _begin(self, piece: Piece) -> Iterator[bytes]:
        self._open = _OpenItem(piece, self._item_id(piece), io.StringIO())
        item = self._item(self._open.id, piece, "", _IN_PROGRESS)
        yield self._event("output_item.added", output_index=len(self._items), item=item)
        if piece.kind != CALL:
            yield self._content_event("content_part.added", part=_part(piece.kind, ""))

    def _close(self, status: str) -> Iterator[bytes]:
        if self._open is None:
            return
        piece = self._open.piece
        text = self._open.text.getvalue()
        if self._is_custom(piece):
            text = _custom_input(text)
            yield self._item_event("custom_tool_call_input.delta", delta=text)
            yield self._item_event("custom_tool_call_input.done", input=text)
        elif piece.call is not None:
            yield self._part_event("done", name=piece.call.name, arguments=text)
        else:
            yield self._part_event("done", text=text, **_logprobs(piece.kind))
            yield self._content_event("content_part.done", part=_part(piece.kind, text))
        item = self._item(self._open.id, piece, text, status)
        yield self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None

    def _is_custom(self, piece: Piece) -> bool:
        return piece.call is not None and piece.call.name in self._echo.custom_tools

    def _item_id(self, piece: Piece) -> str:
        prefix = _ID_PREFIXES.get(piece.kind, "msg_")
        return f"{prefix}{self._request.id.partition('_')[2]}_{len(self._items)}"

    def _item(self, item_id: str, piece: Piece, text: str, status: str) -> dict[str, Any]:
        if piece.call is not None:
            call = {"id": item_id, "status": status, "call_id": piece.call.id, "name": piece.call.name}
            if self._is_custom(piece):
                return call | {"type": "custom_tool_call", "input": text}
            return call | {"type": "function_call", "arguments": text}
        content = [_part(piece.kind, text)] if status != _IN_PROGRESS else []
        if piece.kind != REASONING:
            message = {"type": "message", "role": "assistant", "status": status, "content": content}
            return {"id": item_id, **message}
        item = {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}
        if self._echo.shows_encrypted:
            item["encrypted_content"] = base64.b64encode(text.encode(errors="replace")).decode()
        return item

    def _part_event(self, suffix: str, **fields: Any) -> bytes:
        """About the text or the arguments of the open item."""
        assert self._open is not None
        kind = self._open.piece.kind
        event = f"{_EVENTS.get(kind, 'output_text')}.{suffix}"
        return self._content_event(event, **fields) if kind != CALL else self._item_event(event, **fields)

    def _content_event(self, event: str, **fields: Any) -> bytes:
        return self._item_event(event, content_index=0, **fields)

    def _item_event(self, event: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(event, item_id=self._open.id, output_index=len(self._items), **fields)

    def _event(self, event: str, **fields: Any) -> bytes:
        kind = f"response.{event}"
        data = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _custom_input(arguments: str) -> str:
    """The text in the arguments of a custom tool; if the model wrote others, all of them."""
    try:
        return msgspec.json.decode(arguments, type=_CustomArguments).input
    except (msgspec.DecodeError, RecursionError):
        return arguments


class _CustomArguments(msgspec.Struct):
    input: str


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _logprobs(kind: str) -> dict[str, Any]:
    return {} if kind in (REASONING, CALL) else {"logprobs": []}
