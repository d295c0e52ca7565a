"""JSON schemas as xgrammar honours them: read part by part, and written in the few forms that it reads right.

    {}                                        any value
    {"$ref": "#/$defs/3"}                     a part that something refers to
    {"anyOf": [...]}, {"enum": [...]}         with nothing next to them
    {"type": ..., keywords of these types}    see `schema_parts` and `schema_objects`

What it would ignore is refused with its place in the schema, and so is a part that no value fits.
"""

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from workers.grammar.schema_objects import object_keywords
from workers.grammar.schema_parts import (
    ARRAY_KEYWORDS,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
    STRING_KEYWORDS,
    Schema,
    SchemaError,
    array_keywords,
    cannot_enforce,
    integer_keywords,
    is_exact_bound,
    listed,
    number_keywords,
    string_keywords,
)
from workers.grammar.schema_recursion import check_finite

__all__ = ["loaded", "prepared", "written"]

_IGNORED = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("contains", "minContains", "maxContains", "uniqueItems", "multipleOf", "additionalItems"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that restrict values and that xgrammar does not read."""
_NEUTRAL = {"uniqueItems": False, "minContains": 0}
_HEADS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Where one of these is, xgrammar reads no other keyword."""
_KEYWORDS = (
    frozenset({"type", *_HEADS}) | OBJECT_KEYWORDS | ARRAY_KEYWORDS | STRING_KEYWORDS | NUMBER_KEYWORDS
)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_WHOLE = 2**63


def prepared(schema: Any) -> Schema:
    """The schema, decoded from JSON, for xgrammar. Raises SchemaError."""
    try:
        return _SchemaReader(schema).whole()
    except RecursionError:
        raise SchemaError("the schema is nested too deeply, or has too long names", "#") from None


def loaded(text: str) -> Any:
    """Decoded JSON. Raises SchemaError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise SchemaError(f"it is not valid JSON: {error}", "#") from None


def written(value: Any) -> str:
    """`value` as JSON for xgrammar. Raises SchemaError for text that is no Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SchemaError("a text in it has half of a surrogate pair", "#") from None
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


@dataclass
class _SchemaReader:
    """Reads one schema."""

    schema: Any
    _names: dict[int, str] = field(default_factory=dict)
    """`$ref`s of what is written, by the part of `schema` that they name."""
    _waiting: list[tuple[str, Any, str]] = field(default_factory=list)
    _parts: list[tuple[Schema, str]] = field(default_factory=list)

    def whole(self) -> Schema:
        self._names[id(self.schema)] = "#"
        written = self.read(self.schema, "#")
        if written is None:
            raise SchemaError("no value fits 'false'", "#")
        targets = {"#": written}
        while self._waiting:
            name, value, path = self._waiting.pop()
            target = self.read(value, path)
            assert target is not None, "a reference to `false` is refused"
            targets[name] = target
        check_finite(self._parts, targets)
        definitions = {name.removeprefix("#/$defs/"): part for name, part in targets.items() if name != "#"}
        return written | {"$defs": definitions} if definitions else written

    def read(self, value: Any, path: str) -> Schema | None:
        """The part at `path`, for xgrammar; None: it is `false`, which no value fits."""
        if value is False:
            return None
        if value is True:
            written: Schema = {}
        elif isinstance(value, dict):
            written = self._written(value, path)
        else:
            raise SchemaError("a schema must be an object or a boolean", path)
        self._parts.append((written, path))
        return written

    def resolved(self, value: Any, path: str) -> Any:
        """The part itself, or what its `$ref` names."""
        seen = set()
        while isinstance(value, dict) and "$ref" in value:
            self._check_keywords(value, path)
            if id(value) in seen:
                raise SchemaError("the schema refers to itself without progress", path)
            seen.add(id(value))
            value, path = self._target(value["$ref"], path)
        return value

    def _written(self, part: Schema, path: str) -> Schema:
        head = self._check_keywords(part, path)
        match head:
            case "$ref":
                return self._reference(part["$ref"], path)
            case "enum" | "const":
                return self._enumerated(_values(part, head, path), path)
            case None:
                return self._typed(part, path)
        options = [
            option
            for index, each in enumerate(listed(part, head, path))
            if (option := self.read(each, f"{path}/{head}/{index}")) is not None
        ]
        if not options:
            raise SchemaError(f"no value fits an empty '{head}'", path)
        return options[0] if head == "allOf" else {"anyOf": options}

    def _check_keywords(self, part: Schema, path: str) -> str | None:
        """The keyword that excludes others, if there is one. Raises SchemaError for what it would hide."""
        for name in sorted(_IGNORED & part.keys()):
            if name not in _NEUTRAL or part[name] != _NEUTRAL[name]:
                raise cannot_enforce(f"'{name}'", path)
        head = next((name for name in _HEADS if name in part), None)
        if head is not None:
            allowed = {head, "type"} if head in ("enum", "const") else {head}
            if others := (_KEYWORDS & part.keys()) - allowed:
                raise cannot_enforce(f"'{min(others)}' next to '{head}'", path)
            if head == "allOf" and len(listed(part, head, path)) > 1:
                raise cannot_enforce("'allOf' with several parts", path)
        return head

    def _reference(self, reference: Any, path: str) -> Schema:
        target, target_path = self._target(reference, path)
        if target is True:
            return {}
        name = self._names.get(id(target))
        if name is None:
            name = f"#/$defs/{len(self._names)}"
            self._names[id(target)] = name
            self._waiting.append((name, target, target_path))
        return {"$ref": name}

    def _target(self, reference: Any, path: str) -> tuple[Any, str]:
        """What a `$ref` names, and its path."""
        first, *names = reference.split("/") if isinstance(reference, str) else [""]
        found = self.schema
        for name in names:
            key = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = (
                    found[int(key)] if key.isdecimal() and len(key) < 9 and int(key) < len(found) else None
                )
            else:
                found = found.get(key) if isinstance(found, dict) else None
        if first != "#" or found is None:
            raise SchemaError(f"'$ref' is {reference!r:.80}, which names no part of the schema", path)
        if found is False:
            raise SchemaError(f"no value fits 'false', which {reference!r:.80} names", path)
        return found, reference

    def _enumerated(self, values: list[Any], path: str) -> Schema:
        """One of `values`, by the parts that say what xgrammar would write in one way only, or inexactly."""
        plain = [value for value in values if _is_plain(value, path)]
        parts: list[Schema] = [{"enum": plain}] if plain else []
        parts += [self._constant(value, path) for value in values if not _is_plain(value, path)]
        self._parts += [(part, path) for part in parts]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _constant(self, value: Any, path: str) -> Schema:
        if isinstance(value, float):
            return {"type": "number", "minimum": value, "maximum": value}
        if isinstance(value, list):
            items = [self._enumerated([each], path) for each in value]
            first: Schema = {"prefixItems": items, "minItems": len(items)} if items else {}
            return {"type": "array", "items": False, **first}
        properties = {name: self._enumerated([each], path) for name, each in value.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    def _typed(self, part: Schema, path: str) -> Schema:
        kinds = _kinds(part, path)
        if not kinds:
            return {}
        written: Schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
        for kind in kinds:
            match kind:
                case "string":
                    written |= string_keywords(part, path)
                case "integer":
                    written |= integer_keywords(part, path)
                case "number":
                    written |= number_keywords(part, path)
                case "array":
                    written |= array_keywords(part, path, self)
                case "object":
                    written |= object_keywords(part, path, self)
        return written


def _kinds(part: Schema, path: str) -> list[str]:
    """The types of values that a part allows; empty: any value at all."""
    if "type" in part:
        return _types(part["type"], path)
    keywords = _KEYWORDS & part.keys()
    if not keywords:
        return []
    for kind, names in (("object", OBJECT_KEYWORDS), ("array", ARRAY_KEYWORDS)):
        if keywords <= names:
            return [kind]
    raise cannot_enforce(f"'{min(keywords)}' without 'type'", path)


def _types(given: Any, path: str) -> list[str]:
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not types or not all(isinstance(each, str) for each in types):
        raise SchemaError("'type' must be a string, or an array of strings", path)
    if unknown := [each for each in types if each not in _TYPES]:
        raise SchemaError(f"'type' is {unknown[0]!r:.60}, which is none of {', '.join(_TYPES)}", path)
    return [kind for kind in _TYPES if kind in types and not (kind == "integer" and "number" in types)]


def _values(part: Schema, head: str, path: str) -> list[Any]:
    """The values of `enum` or `const` that have the type of the part."""
    values = [part["const"]] if head == "const" else listed(part, "enum", path)
    if not values:
        raise SchemaError("no value fits an empty 'enum'", path)
    if "type" in part:
        types = _types(part["type"], path)
        values = [value for value in values if _has_type(value, types)]
        if not values:
            raise SchemaError(f"no value of '{head}' has the type {part['type']!r:.60}", path)
    return values


def _is_plain(value: Any, path: str) -> bool:
    """Whether xgrammar writes the value as JSON usually is, and it has no parts."""
    if isinstance(value, int) and not -_MAX_WHOLE <= value < _MAX_WHOLE:
        raise cannot_enforce("an integer constant of more than 64 bits", path)
    if isinstance(value, float):  # it writes 17 digits, such as 0.10000000000000001
        return f"{value:.17g}" == repr(value) or not is_exact_bound(value)
    return not isinstance(value, (list, dict))


def _has_type(value: Any, types: list[str]) -> bool:
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
