"""JSON schemas as xgrammar honours them: what it would ignore is refused."""

import json
from collections.abc import Iterator
from typing import Any

_IGNORED = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("contains", "minContains", "maxContains", "uniqueItems", "multipleOf"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that restrict values and that xgrammar does not read."""
_NEUTRAL = {"uniqueItems": False, "minContains": 0}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_VALUES = ("items", "additionalProperties", "additionalItems", "propertyNames")
_OPEN = ("properties", "patternProperties", "additionalProperties", "propertyNames", "$ref", *_LISTS)


class SchemaError(ValueError):
    """A schema that cannot be honoured; the text is for the client."""


def prepared(text: str) -> str:
    """The schema `text` for xgrammar. Raises SchemaError.

    xgrammar allows no property that a schema does not name. A schema of an object that names none at all
    means any object.
    """
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise SchemaError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise SchemaError("a JSON schema must be an object")
    for part in _schemas(schema):
        _check(part)
        if part.get("type") == "object" and not any(name in part for name in _OPEN):
            part["additionalProperties"] = True
    return json.dumps(schema, ensure_ascii=False)


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema, and all schemas inside of it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _MAPS:
            if isinstance(inner := part.get(name), dict):
                waiting += inner.values()
        for name in _LISTS:
            if isinstance(inner := part.get(name), list):
                waiting += inner
        for name in _VALUES:
            inner = part.get(name)
            waiting += inner if isinstance(inner, list) else [inner]


def _check(part: dict[str, Any]) -> None:
    for name in sorted(_IGNORED & part.keys()):
        if name not in _NEUTRAL or part[name] != _NEUTRAL[name]:
            raise SchemaError(f"the schema uses '{name}', which this server cannot enforce: leave it out")
    if len(part.get("allOf") or ()) > 1:
        raise SchemaError("the schema uses 'allOf' with several parts, which this server cannot enforce")
