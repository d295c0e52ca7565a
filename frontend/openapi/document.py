"""OpenAPI 3.1 from the schemas that decode requests, and the structs that responses are made of."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from atom.shared.utils.version import atom_version
from frontend.api.chat.schema import MESSAGE, ChatRequest
from frontend.api.messages import schema as messages
from frontend.api.messages.schema import CountRequest, MessagesRequest, Turn
from frontend.api.responses import schema as responses
from frontend.api.responses.schema import ResponsesRequest
from frontend.api.schemas.fields import Schema
from frontend.api.tokenization.schema import TokenizeRequest
from frontend.errors import ErrorBody
from frontend.openapi.operations import JSON, OPERATIONS, Operation

__all__ = ["openapi_document"]

_REFERENCE = "#/components/schemas/{name}"
_ITEMS: dict[tuple[type, str], list[Schema[Any]]] = {
    (ChatRequest, "messages"): [MESSAGE],
    (ChatRequest, "prompt"): [MESSAGE],
    (TokenizeRequest, "messages"): [MESSAGE],
    (ResponsesRequest, "input"): list(responses.ITEMS.values()),
    (ResponsesRequest, "tools"): [responses.TOOL],
    (CountRequest, "messages"): [messages.TURN],
    (CountRequest, "tools"): [messages.TOOL],
    (MessagesRequest, "messages"): [messages.TURN],
    (MessagesRequest, "tools"): [messages.TOOL],
    (Turn, "content"): list(messages.BLOCKS.values()),
}
"""Lists whose items have schemas of their own."""
_ERRORS = {
    400: "The request is invalid; `param` names the field",
    401: "No valid API key",
    403: "Not allowed",
    404: "Unknown model or id",
    405: "The method is not supported",
    408: "The body came too late, or the request's own timeout has passed",
    409: "Already in this state",
    413: "The body is too large",
    429: "The server is full; see Retry-After",
    500: "The engine failed the request",
    503: "No engine can serve it now; see Retry-After",
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
        },
    },
}


def openapi_document() -> dict[str, Any]:
    """The document, without the server's address."""
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    responses = [operation.response for operation in OPERATIONS if operation.response is not None]
    items = [schema for each in _ITEMS.values() for schema in each]
    schemas = list(_with_nested([*bodies, *items]))
    types = {schema.struct for schema in schemas} | set(responses) | {ErrorBody}
    _, components = msgspec.json.schema_components(
        sorted(types, key=lambda kind: (kind.__module__, kind.__name__)), ref_template=_REFERENCE
    )
    for schema in schemas:
        _add_rules(components[_name(components, schema.struct)], schema)
    for (struct, name), each in _ITEMS.items():
        _describe_items(components, struct, name, each)
    components["AnthropicError"] = _ANTHROPIC_ERROR
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ATOM", "version": atom_version()},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_items(
    components: dict[str, Any], struct: type, field: str, schemas: Iterable[Schema[Any]]
) -> None:
    """Say what the items of a list are, which is decoded item by item."""
    forms = [{"$ref": _REFERENCE.format(name=_name(components, schema.struct))} for schema in schemas]
    described = components[_name(components, struct)]["properties"][field]
    for part in [described, *described.get("anyOf", ())]:
        if part.get("type") == "array":
            part["items"] = {"anyOf": forms}
            if field == "messages":
                part["minItems"] = 1


def _with_nested(schemas: Iterable[Schema[Any]]) -> Iterator[Schema[Any]]:
    for schema in schemas:
        yield schema
        yield from _with_nested(nested for nested in schema.nested.values() if nested is not None)


def _name(components: dict[str, Any], struct: type) -> str:
    """The component of a struct: msgspec qualifies names that several modules have."""
    qualified = f"{struct.__module__}.{struct.__qualname__}"
    return qualified if qualified in components else struct.__name__


def _add_rules(component: dict[str, Any], schema: Schema[Any]) -> None:
    """Add fields that are accepted without effect, or with neutral values only; all others are refused."""
    for name in sorted(schema.harmless):
        component["properties"].setdefault(name, {"description": "Accepted; it cannot change the output."})
    for name, values in sorted(schema.neutral.items()):
        component["properties"][name] = {
            "description": "Not supported; these values are accepted.",
            "enum": [None, *values],
        }
    component["additionalProperties"] = False


def _operation(operation: Operation, components: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation, components)}
    if operation.needs_key:
        described["security"] = [{"key": []}, {}]
    if operation.parameters or operation.query or operation.headers:
        described["parameters"] = [
            *(_in_path(name, text) for name, text in operation.parameters.items()),
            *({"name": name, "in": "query", **parameter} for name, parameter in operation.query.items()),
            *({"name": name, "in": "header", **header} for name, header in operation.headers.items()),
        ]
    if operation.body is not None:
        schema = {"$ref": _REFERENCE.format(name=_name(components, operation.body.struct))}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _in_path(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string"}}


def _responses(operation: Operation, components: dict[str, Any]) -> dict[str, Any]:
    schema = (
        {}
        if operation.response is None
        else {"schema": {"$ref": _REFERENCE.format(name=_name(components, operation.response))}}
    )
    content: dict[str, Any] = {operation.content: schema}
    if operation.streams:
        content["text/event-stream"] = {}
    responses: dict[str, Any] = {}
    if not operation.is_refused:
        responses["200"] = {"description": "Success", "content": content}
    error = "AnthropicError" if operation.anthropic else _name(components, ErrorBody)
    reference = {"schema": {"$ref": _REFERENCE.format(name=error)}}
    for status in sorted({400, 401, 403, 404, 405, *operation.errors}):
        responses[str(status)] = {"description": _ERRORS[status], "content": {JSON: reference}}
    return responses
