"""Tool calls that write one tag per parameter, with a value in plain text.

The text becomes JSON by the parameter's schema. Strings are streamed; other values, and strings whose
texts the schema names, are held until they end.
Text that does not fit its schema becomes a string.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NoReturn

from frontend.text.reply_formats.json_calls import JsonSpan
from frontend.text.reply_formats.text import MAX_HELD, Markers, TextParser

__all__ = ["ANY", "STRING", "XmlCalls", "is_json", "kinds_of", "typed"]

STRING = frozenset({"string"})
# In the order in which they are tried.
_ORDER = ("null", "integer", "number", "boolean", "object", "array")
ANY = frozenset({*_ORDER, *STRING})
_EXACT = "exact"
"""Besides the types: the schema names the texts of a string, so that white space around is no part of it."""
_TEXTS = frozenset({"enum", "const", "pattern"})
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}
_INTEGER = re.compile(r"(-?(?:0|[1-9]\d*))(?:\.0+)?")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
# A schema may refer to itself.
_MAX_SCHEMAS = 256


class XmlCalls(TextParser, ABC):
    """Writes the arguments of one call as JSON; subclasses have the tags, and read names and keys."""

    UNKNOWN: ClassVar[frozenset[str]]
    """The types of parameters that have no schema."""
    PARAMETER: ClassVar[str]
    """The tag before a key."""
    BETWEEN: ClassVar[Markers]
    """`PARAMETER`, and the tags that end a function."""
    VALUE_END: ClassVar[str]
    VALUE_ENDS: ClassVar[Markers]
    """`VALUE_END`, also after a newline, and the tags that end a value without it."""

    ENFORCED_ENDS: ClassVar[Markers]
    """The same, where a grammar enforces `VALUE_END`."""

    _head = ""
    """What was consumed of a name or key, to be content if it is none."""
    _function = ""
    _kinds = STRING
    _value: str | None = None
    """The value that is held until it ends; None while a string is streamed."""
    _span: JsonSpan | None = None
    """Span of a value that must be JSON, where it is enforced."""

    @abstractmethod
    def _key(self) -> bool:
        """After `PARAMETER`; `_head` is empty."""

    @abstractmethod
    def _after_function(self, marker: str) -> None:
        """After a tag that ended a function."""

    def _between(self) -> bool:
        """Between parameters."""
        text, marker = self._take(self.BETWEEN)
        self._write(text)
        if marker is None:
            if self._ended and self._complete:
                self._end_function()
            return False
        if marker == self.PARAMETER:
            self._head = ""
            self._state = self._key
            return True
        self._end_function()
        self._after_function(marker)
        return True

    def _in_value(self) -> bool:
        text, marker = self._take(self.ENFORCED_ENDS if self._options.enforced else self.VALUE_ENDS)
        self._add_value(text)
        if self._span is not None:
            self._span.feed(text)
            if marker is not None and self._span.in_string:
                self._add_value(marker)
                return True
        if marker is None:
            if not self._ended:
                return False
            if not self._complete:
                self._cut_value()
                self._state = self._content
                return True
        self._end_value()
        self._state = self._between
        if marker is not None and not marker.endswith(self.VALUE_END):
            self._buffer = marker + self._buffer
        return True

    def _start_function(self, name: str) -> None:
        self._function = name
        self._start(name)

    def _start_value(self, parameter: str) -> None:
        self._kinds = self._parameter_kinds(parameter)
        self._argue((", " if self._has_arguments else "{") + _quoted(parameter) + ": ")
        self._value = "" if self._kinds != STRING else None
        is_json = self._options.enforced and not self._kinds >= STRING
        self._span = JsonSpan() if is_json else None
        if self._value is None:
            self._argue('"')

    def _add_value(self, text: str) -> None:
        if self._value is None:
            self._argue(_quoted(text)[1:-1])
            return
        self._value += text
        if len(self._value) > MAX_HELD:  # too long to be parsed: a string
            self._argue(_quoted(self._value)[:-1])
            self._value = None

    def _end_value(self) -> None:
        self._argue('"' if self._value is None else typed(self._value, self._kinds))

    def _cut_value(self) -> None:
        """The reply ended within a value."""
        if self._value is not None:
            self._argue(self._value)

    def _end_function(self) -> None:
        if self._has_arguments:
            self._argue("}")
        self._end()

    def _parameter_kinds(self, parameter: str) -> frozenset[str]:
        known = self._options.kinds
        key = (self._function, parameter)
        schema = (self._options.tools or {}).get(self._function, {})
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and parameter in properties:
            wanted = properties[parameter]
        else:
            key = (self._function, "")
            wanted = schema.get("additionalProperties")
        if key not in known:
            known[key] = kinds_of(wanted, schema) or self.UNKNOWN
        return known[key]


def typed(text: str, kinds: frozenset[str]) -> str:
    """`text` as JSON of the first type in `kinds` that it has, else as a string."""
    plain = text.strip()
    for kind in _ORDER:
        if kind in kinds and (value := _as_kind(plain, kind)) is not None:
            return value
    return _quoted(plain if _EXACT in kinds else text)


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not say. `root` has its `$defs`."""
    kinds: set[str] = set()
    waiting = [schema]
    seen = 0
    while waiting and seen < _MAX_SCHEMAS:
        seen += 1
        if isinstance(found := waiting.pop(), Mapping):
            kinds.update(_named_kinds(found))
            waiting.extend(_branches(found, root))
    return frozenset(kinds) & (ANY | {_EXACT} if kinds >= STRING else ANY)


def _named_kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    if not _TEXTS.isdisjoint(schema):
        yield _EXACT
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (kind for kind in named if isinstance(kind, str))
    elif isinstance(schema.get("enum"), list):
        yield from map(_kind, schema["enum"])
    elif "const" in schema:
        yield _kind(schema["const"])
    elif "properties" in schema:
        yield "object"
    elif "items" in schema:
        yield "array"


def _branches(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            yield from schema[name][:_MAX_SCHEMAS]
    path = schema.get("$ref")
    if isinstance(path, str) and path.startswith("#/"):
        found: Any = root
        for part in path[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        yield found


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _as_kind(text: str, kind: str) -> str | None:
    match kind:
        case "null":
            return "null" if text.lower() == "null" else None
        case "integer":
            found = _INTEGER.fullmatch(text)
            return found[1] if found else None
        case "number":
            return text if _NUMBER.fullmatch(text) else None
        case "boolean":
            return _BOOLEANS.get(text.lower())
    first = "{" if kind == "object" else "["
    return text if text.startswith(first) and is_json(text) else None


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
