"""JSON schemas as xgrammar honours them: what it would ignore is refused."""

import json
import re
from collections.abc import Iterator
from typing import Any

from workers.grammar.vocabulary import SPECIAL_SIGN

Schema = dict[str, Any]

_IGNORED = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("contains", "minContains", "maxContains", "uniqueItems", "multipleOf"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that restrict values and that xgrammar does not read."""
_NEUTRAL = {"uniqueItems": False, "minContains": 0}
_HEADS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Where one of these is, xgrammar reads no other keyword."""
_LENGTHS = ("minLength", "maxLength")
_OBJECTS = frozenset(
    {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    }
)
_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_OTHERS = frozenset(
    {
        *("type", "pattern", "format", *_LENGTHS, *_HEADS),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
_FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"),
        *("uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
"""Those that xgrammar enforces; others are annotations."""
_NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions")
_LISTED_PARTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_LISTS = (*_LISTED_PARTS, "enum", "required")
_OPEN = ("properties", "patternProperties", "additionalProperties", "propertyNames")
_CHARACTER_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_PLAIN_CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
"""All that may stand in a JSON string without an escape sequence."""
_NO_PLAIN_CHARACTER = re.compile(r'["\x00-\x1f]|\\[\\nrtfv]')


class SchemaError(ValueError):
    """A schema that cannot be honoured; the text is for the client."""


def prepared(text: str) -> str:
    """The schema `text` for xgrammar. Raises SchemaError."""
    schema = _loaded(text)
    if not isinstance(schema, (dict, bool)):
        raise SchemaError("a JSON schema must be an object")
    _prepare(schema)
    return json.dumps(schema, ensure_ascii=False)


def prepared_tag(text: str, lenient: bool) -> str:
    """The structural tag `text` with its JSON schemas for xgrammar.

    Raises SchemaError for one that cannot be honoured; if `lenient`, that one becomes any object.
    """
    tag = _loaded(text)
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        _exclude_special(part)
        if part.get("type") != "json_schema":
            waiting += part.values()
            continue
        try:
            _prepare(part.get("json_schema"))
        except SchemaError:
            if not lenient:
                raise
            part["json_schema"] = {"type": "object", "additionalProperties": True}
    return json.dumps(tag, ensure_ascii=False)


def _exclude_special(part: dict[str, Any]) -> None:
    """Exclude special tokens from a part of a structural tag in which xgrammar would allow them."""
    if part.get("type") == "qwen_xml_parameter":  # its older name
        part |= {"type": "json_schema", "style": "qwen_xml"}
    is_free = (
        part.get("type") in ("any_text", "dispatch", "triggered_tags") or part.get("style", "json") != "json"
    )
    if is_free and isinstance(excludes := part.get("excludes", []), list):
        part["excludes"] = [*excludes, SPECIAL_SIGN]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SchemaError(f"it is not valid JSON: {error}") from None


def _prepare(schema: Any) -> None:
    for part in _parts(schema):
        _check(part)
        _rewrite(part)


def _parts(schema: Schema | bool) -> Iterator[Schema]:
    """The schema, all schemas inside of it, and what they refer to; each once. Raises SchemaError."""
    waiting: list[Any] = [schema]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(names := part.get("propertyNames"), dict) and not _OTHERS & {*names} - {*_LENGTHS}:
            names["type"] = "string"
        yield part
        for name in _NAMED_PARTS:
            waiting += part.get(name, {}).values()
        for name in _LISTED_PARTS:
            waiting += part.get(name, ())
        waiting += [part.get(name) for name in ("items", "additionalProperties", "propertyNames")]
        if "$ref" in part:
            waiting.append(_target(schema, part["$ref"]))


def _target(schema: Any, reference: Any) -> Any:
    """What a `$ref` names, found as xgrammar does; it would take a reference to elsewhere as any value."""
    first, *names = reference.split("/") if isinstance(reference, str) else [""]
    found = schema
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    if first != "#" or found is None:
        raise SchemaError(f"'$ref' is {reference!r:.80}, which names no part of the schema")
    return found


def _check(part: Schema) -> None:
    """Raises SchemaError for a wrong value, and for a keyword that xgrammar does not read where it stands."""
    _check_values(part)
    for name in sorted(_IGNORED & part.keys()):
        if name not in _NEUTRAL or part[name] != _NEUTRAL[name]:
            raise _refusal(f"'{name}'")
    keywords = part.keys() & (_OBJECTS | _ARRAYS | _OTHERS)
    head = next((name for name in _HEADS if name in part), None)
    if head is not None:
        others = keywords - {head} - ({"type"} if head in ("enum", "const") else set())
        if others:
            raise _refusal(f"'{min(others)}' beside '{head}'")
        if head == "allOf" and len(part[head]) > 1:
            raise _refusal("'allOf' with several parts")
    elif "type" not in part and not keywords <= (_OBJECTS if "properties" in part else _ARRAYS):
        raise _refusal(f"'{min(keywords)}' without 'type'")
    if "pattern" in part:
        _check_pattern(part["pattern"])
    for name in _LENGTHS:
        if name in part and ("pattern" in part or part.get("format") in _FORMATS):
            raise _refusal(f"'{name}' beside 'pattern' or 'format'")
    undeclared = [name for name in part.get("required", ()) if name not in part.get("properties", {})]
    if undeclared:
        raise _refusal(f"a required property that 'properties' does not declare, {undeclared[0]!r:.60}")


def _check_values(part: Schema) -> None:
    """Raises SchemaError for values of the wrong type, of the keywords that this module reads."""
    for names, kind, wanted in ((_NAMED_PARTS, dict, "an object"), (_LISTS, list, "an array")):
        for name in names:
            if not isinstance(part.get(name, kind()), kind):
                raise SchemaError(f"'{name}' must be {wanted}")
    for name in _LENGTHS:
        length = part.get(name, 0)
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise SchemaError(f"'{name}' must be a whole number, 0 or more")
    if not isinstance(part.get("type", ""), (str, list)):
        raise SchemaError("'type' must be a string or an array")


def _check_pattern(pattern: Any) -> None:
    if isinstance(pattern, str) and _NO_PLAIN_CHARACTER.search(_CHARACTER_CLASS.sub("", pattern)):
        raise _refusal("a 'pattern' with quotes, backslashes or control characters")


def _rewrite(part: Schema) -> None:
    """Say in another way what xgrammar would read otherwise than JSON Schema."""
    types = part.get("type")
    if types == "object" and not any(name in part for name in _OPEN):
        part["additionalProperties"] = True  # it would allow the empty object alone
    if any(name in part for name in _LENGTHS):  # it would allow control characters, and surrogates
        low = part.pop("minLength", 0)
        high = part.pop("maxLength", "")
        part["pattern"] = f"^{_PLAIN_CHARACTER}{{{low},{high}}}$"
    for name in ("enum", "const"):
        if name in part and types is not None:
            values = part[name] if name == "enum" else [part[name]]
            kept = [value for value in values if _has_type(value, types)]
            if not kept:
                raise SchemaError(f"no value of '{name}' has the type {types!r:.60}")
            part.pop("const", None)
            part["enum"] = kept


def _has_type(value: Any, types: str | list[str]) -> bool:
    match value:
        case None:
            name = "null"
        case bool():
            name = "boolean"
        case int():
            name = "integer"
        case float():
            name = "integer" if value.is_integer() else "number"
        case str():
            name = "string"
        case list():
            name = "array"
        case _:
            name = "object"
    return name in types or (name == "integer" and "number" in types)


def _refusal(what: str) -> SchemaError:
    return SchemaError(f"the schema uses {what}, which this server cannot enforce")
