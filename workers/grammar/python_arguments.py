"""The arguments of a call as in Python, as a part of structural tags: `city="Paris", days=3, yes=True`.

xgrammar has no style for them. Keys are in the order of the schema, those that are required first. Values
are JSON, which is Python's spelling too but for three words: these have Python's where they are a value.
"""

import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

from workers.grammar.patterns import PatternError, full_match
from workers.grammar.schema_parts import Schema, SchemaError, cannot_enforce

__all__ = ["MAX_WHITESPACE", "python_arguments"]

MAX_WHITESPACE = 16
"""Most white space between two tokens of JSON: a line break, and an indentation of seven levels."""

Format = dict[str, Any]

_KEY = re.compile(r"[^\W\d]\w*")
_ANY_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_SEPARATOR = ", "
_MAX_FIRST = 16
"""Most keys of which each may be the first: what follows is written once for each."""
_ROOT = "root"
"""What a reference to the whole schema names; other definitions have numbers."""
_COUNTS = ("patternProperties", "minProperties", "maxProperties")
_WORDS = {"boolean": ("True", "False"), "null": ("None",)}


def python_arguments(schema: Schema) -> Format:
    """The arguments for a schema that was prepared. Raises SchemaError."""
    return _Arguments(schema).of(schema)


class _Arguments:
    """Writes the parts of one schema."""

    def __init__(self, schema: Schema):
        definitions = dict(schema.get("$defs", {}))
        root = {name: value for name, value in schema.items() if name != "$defs"}
        self._definitions: dict[str, Schema] = _renamed({**definitions, _ROOT: root})
        self._references = {name: _references(part) for name, part in self._definitions.items()}

    def of(self, schema: Schema) -> Format:
        """The arguments for the whole schema, or for a part of it."""
        if "anyOf" in schema:
            return _or(self.of(each) for each in schema["anyOf"])
        if "$ref" in schema:
            return self.of(self._definitions[_renamed(schema)["$ref"].removeprefix("#/$defs/")])
        kinds = schema.get("type", "object")
        if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
            raise SchemaError("arguments are an object, which the schema does not allow", "#")
        for name in _COUNTS:
            if name in schema:
                raise cannot_enforce(f"'{name}' for calls as in Python", "#")
        return self._object(schema)

    def _object(self, schema: Schema) -> Format:
        properties: dict[str, Schema] = schema.get("properties", {})
        for name in properties:
            if not _KEY.fullmatch(name):
                raise SchemaError(f"the property {name!r:.60} cannot be a key in Python", "#/properties")
        required = [name for name in properties if name in schema.get("required", ())]
        optional = [name for name in properties if name not in required]
        rest = self._further(schema, properties)
        first = [] if rest is None else [_sequence(rest, _star(_sequence(_text(_SEPARATOR), rest)))]
        after = [] if rest is None else [_star(_sequence(_text(_SEPARATOR), rest))]
        if not required and len(optional) > _MAX_FIRST:
            raise cannot_enforce(f"more than {_MAX_FIRST} properties, none of them required,", "#")
        for name in reversed([*required, *optional]):
            pair = _sequence(_text(f"{name}="), self._value(properties[name]))
            whole = _sequence(pair, *after)
            first = [whole] if name in required else [whole, *first]
            next_one = _sequence(_text(_SEPARATOR), pair)
            after = [next_one if name in required else _optional(next_one), *after]
        if not first:
            return _text("")
        return first[0] if required else _optional(_or(first))

    def _further(self, schema: Schema, properties: Iterable[str]) -> Format | None:
        """A key that the schema does not declare, and its value; None: there is none."""
        is_open = schema.get("additionalProperties", True)
        if is_open is False:
            return None
        other = f"(?!(?:{'|'.join(properties)})$)" if properties else ""
        try:
            key = full_match(other + _ANY_KEY)
        except PatternError as error:
            raise cannot_enforce(f"'additionalProperties' next to 'properties' ({error})", "#") from None
        value = self._value({} if is_open is True else is_open)
        return _sequence({"type": "regex", "pattern": key}, _text("="), value)

    def _value(self, schema: Schema) -> Format:
        if "anyOf" in schema:
            return _or(self._value(each) for each in schema["anyOf"])
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not schema:
            return _or([*map(_text, chain(*_WORDS.values())), self._json(schema)])
        if "enum" in schema or _WORDS.keys().isdisjoint(kinds):
            return self._json(schema)
        words = [_text(word) for kind in kinds for word in _WORDS.get(kind, ())]
        others = [kind for kind in kinds if kind not in _WORDS]
        return _or([*words, *([self._json({**schema, "type": others})] if others else [])])

    def _json(self, schema: Schema) -> Format:
        schema = _renamed(schema)
        if definitions := self._needed(schema):
            schema = {**schema, "$defs": definitions}
        return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}

    def _needed(self, schema: Schema) -> dict[str, Schema]:
        """The definitions that a part refers to, and those that they refer to: each part has its own copy."""
        found: dict[str, Schema] = {}
        names = _references(schema)
        while names:
            name = names.pop()
            if name not in found:
                found[name] = self._definitions[name]
                names += self._references[name]
        return found


def _references(part: Any) -> list[str]:
    """The names of the definitions that a part refers to itself."""
    if isinstance(part, list):
        return [name for each in part for name in _references(each)]
    if not isinstance(part, dict):
        return []
    target = part.get("$ref")
    if isinstance(target, str):
        return [target.removeprefix("#/$defs/")]
    return [name for each in part.values() for name in _references(each)]


def _renamed(part: Any) -> Any:
    """`part` with a name for the whole schema, which is not its own whole."""
    if isinstance(part, list):
        return [_renamed(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part == {"$ref": "#"}:
        return {"$ref": f"#/$defs/{_ROOT}"}
    return {name: _renamed(value) for name, value in part.items()}


def _text(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _or(elements: Iterable[Format]) -> Format:
    found = list(elements)
    return found[0] if len(found) == 1 else {"type": "or", "elements": found}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _star(content: Format) -> Format:
    return {"type": "star", "content": content}
