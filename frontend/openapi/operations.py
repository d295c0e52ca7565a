"""The public routes: what each takes and returns. A test compares them with the application's."""

from dataclasses import dataclass, field
from typing import Any

from frontend.api.chat.schema import CHAT, ChatResponse
from frontend.api.completions.schema import COMPLETIONS, CompletionResponse
from frontend.api.messages.schema import COUNT, MESSAGES, CountResponse, MessagesResponse
from frontend.api.models.schema import ModelCard, ModelList
from frontend.api.responses.input_items import InputItems
from frontend.api.responses.schema import INPUT_TOKENS, RESPONSES, InputTokens, Response
from frontend.api.schemas.fields import Schema
from frontend.api.schemas.request_info import AbortReport, RequestReport
from frontend.api.tokenization.schema import DETOKENIZE, TOKENIZE, DetokenizeResponse, TokenizeResponse
from frontend.status.records import RangeHistory, State

__all__ = ["OPERATIONS", "Operation"]

JSON = "application/json"
EVENTS = "text/event-stream"
HTML = "text/html"
TEXT = "text/plain"
GENERATION_ERRORS = (408, 413, 429, 500, 503)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One route and method."""

    method: str
    path: str
    summary: str
    body: Schema[Any] | None = None
    response: type | None = None
    """The JSON of a 200; None: any JSON, or `content`."""
    content: str = JSON
    streams: bool = False
    """Whether `stream` makes it a stream of server-sent events."""
    errors: tuple[int, ...] = ()
    """Statuses besides 400, 401 and 404."""
    needs_key: bool = True
    parameters: dict[str, str] = field(default_factory=dict)
    """Parameters of the path, with their descriptions."""
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameters after the path, with description and schema."""
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Headers of the request, with description and schema."""
    is_refused: bool = False
    """Whether it never succeeds."""
    anthropic: bool = False
    """Whether errors are Anthropic's error objects."""


_GENERATION_HEADERS = {
    "X-Request-Id": {
        "description": "Part of the response's id, if the body has no request_id.",
        "schema": {"type": "string"},
    },
    "X-Data-Parallel-Rank": {
        "description": "The engine that serves the request.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "X-Session-ID": {
        "description": "Name of a conversation: one engine gets its requests, unless it is overloaded.",
        "schema": {"type": "string"},
    },
    "X-Request-Timeout": {
        "description": "Seconds until the request is ended.",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 86400},
    },
    "X-Resumable-Stream": {
        "description": "Whether the stream goes on for a client that resumes it on another connection.",
        "schema": {"type": "string", "enum": ["true", "false"]},
    },
    "Last-Event-ID": {
        "description": "The id of the last event of a resumable stream: the same body gets those after it.",
        "schema": {"type": "string"},
    },
    "traceparent": {"description": "W3C trace context.", "schema": {"type": "string"}},
}


def _generation(path: str, summary: str, body: Schema[Any], response: type, **more: Any) -> Operation:
    return Operation(
        method="post",
        path=path,
        summary=summary,
        body=body,
        response=response,
        streams=True,
        errors=GENERATION_ERRORS,
        headers=_GENERATION_HEADERS,
        **more,
    )


def _text(path: str, summary: str, body: Schema[Any], response: type, **more: Any) -> Operation:
    errors = (413, 429, 503)
    return Operation(
        method="post", path=path, summary=summary, body=body, response=response, errors=errors, **more
    )


def _get(path: str, summary: str, **more: Any) -> Operation:
    return Operation(method="get", path=path, summary=summary, **more)


_RESPONSE_ID = {"id": "The id of a stored response."}

OPERATIONS: tuple[Operation, ...] = (
    _generation("/v1/chat/completions", "Chat completions", CHAT, ChatResponse),
    _generation("/v1/completions", "Text completions", COMPLETIONS, CompletionResponse),
    _generation("/v1/responses", "OpenAI's responses", RESPONSES, Response),
    _get("/v1/responses/{id}", "A stored response", response=Response, parameters=_RESPONSE_ID),
    _get(
        "/v1/responses/{id}/input_items",
        "The items that a stored response was made from",
        response=InputItems,
        parameters=_RESPONSE_ID,
        query={
            "limit": {
                "description": "The most items, 20 by default.",
                "schema": {"type": "integer", "minimum": 1, "maximum": 100},
            },
            "order": {
                "description": "The latest first, unless it is asc.",
                "schema": {"type": "string", "enum": ["asc", "desc"]},
            },
            "after": {"description": "The id of the item before them.", "schema": {"type": "string"}},
        },
    ),
    Operation(
        method="delete",
        path="/v1/responses/{id}",
        summary="Delete a stored response",
        parameters=_RESPONSE_ID,
    ),
    Operation(
        method="post",
        path="/v1/responses/{id}/cancel",
        summary="Refused: there are no background responses",
        is_refused=True,
        parameters=_RESPONSE_ID,
    ),
    _get(
        "/v1/streams/{id}",
        "The rest of a stream that was begun with X-Resumable-Stream",
        content=EVENTS,
        errors=(408, 429, 500, 503),
        parameters={"id": "The header X-Stream-Id of its response, and the first part of its event ids."},
        headers={
            "Last-Event-ID": {
                "description": "The id of the last event that the client has; without it all are sent.",
                "schema": {"type": "string"},
            }
        },
    ),
    _text("/v1/responses/input_tokens", "Prompt tokens of a response", INPUT_TOKENS, InputTokens),
    _generation("/v1/messages", "Anthropic's messages", MESSAGES, MessagesResponse, anthropic=True),
    _text(
        "/v1/messages/count_tokens", "Prompt tokens of a conversation", COUNT, CountResponse, anthropic=True
    ),
    _text("/tokenize", "Token ids of a text or a conversation", TOKENIZE, TokenizeResponse),
    _text("/detokenize", "Text of token ids", DETOKENIZE, DetokenizeResponse),
    _get("/v1/models", "The served models", response=ModelList),
    _get(
        "/v1/models/{name}", "One model", response=ModelCard, parameters={"name": "It may contain slashes."}
    ),
    _get(
        "/v1/requests/{id}",
        "Where the time of a request went",
        response=RequestReport,
        errors=(500, 503),
        parameters={"id": "The id of a response."},
    ),
    Operation(
        method="post",
        path="/v1/requests/{id}/abort",
        summary="End a request",
        response=AbortReport,
        errors=(403, 500, 503),
        parameters={"id": "The id of a response that has not ended."},
    ),
    _get("/version", "The version of the server"),
    _get("/server_info", "The running configuration"),
    _get("/metrics", "Prometheus metrics", content=TEXT),
    _get("/openapi.json", "This document"),
    _get("/health", "Whether the process answers", needs_key=False),
    _get("/ready", "Whether requests are served", needs_key=False, errors=(503,)),
    Operation(method="post", path="/start_profile", summary="Start profiling", errors=(403, 409, 500, 503)),
    Operation(method="post", path="/stop_profile", summary="Stop profiling", errors=(403, 409, 500, 503)),
    _get("/", "The status page", content=HTML, needs_key=False),
    _get(
        "/page/{name}",
        "A file of the status page",
        content="*/*",
        needs_key=False,
        parameters={"name": "The file."},
    ),
    _get("/status", "What the status page shows", response=State),
    _get(
        "/status/history/{range}",
        "The points of its charts",
        response=RangeHistory,
        parameters={"range": "5m, 1h or 6h."},
    ),
    _get("/status/events", "The same as a stream", content=EVENTS, errors=(503,)),
)
