"""The keywords of objects, as xgrammar reads them right.

An object has what it declares, in the order of the schema, and then further properties of one kind: of any
names, of those that `propertyNames` allows, or of those that fit `patternProperties`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from workers.grammar.automata import restricted
from workers.grammar.expressions import ANYTHING, Chars, Choice, Join, Node, PatternError
from workers.grammar.patterns import all_but, spelled
from workers.grammar.schema_parts import (
    FORMATS,
    STRING_KEYWORDS,
    PartReader,
    Schema,
    SchemaError,
    bounds,
    cannot_enforce,
    listed,
    mapped,
    pattern_node,
    spelled_pattern,
    string_node,
)

__all__ = ["object_keywords"]

_NAME_KEYWORDS = frozenset({"type", "enum", "const", *STRING_KEYWORDS})
_ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment", "deprecated"})
_NO_NAME = Choice(())


@dataclass(frozen=True)
class _Further:
    """Properties that an object may have without declaring them."""

    value: Schema | None
    """None: there are none."""
    names: Node | None
    """None: any names."""

    def has(self, name: str) -> bool:
        """Whether a property of this name may be one of these."""
        return self.value is not None and _is_allowed(name, self.names)


def object_keywords(part: Schema, path: str, reader: PartReader) -> Schema:
    """For xgrammar. Raises SchemaError."""
    names = _allowed_names(part, path, reader)
    further = _further(part, path, reader, names)
    declared: dict[str, Schema] = {}
    for name, each in mapped(part, "properties", path).items():
        value = reader.read(each, _inside(path, "properties", name))
        if value is not None and _is_allowed(name, names):
            declared[name] = value
            if "patternProperties" in part:
                _check_one_schema(name, value, further, path)
        elif further.has(name):
            raise cannot_enforce(f"further properties beside the excluded property {name!r:.60}", path)
    required = _required(part, path)
    for name in required:
        if name not in declared:
            declared[name] = _undeclared(name, part, path, names, further)
    if names is not None:
        further = replace(further, names=_without(names, declared, path))
    return _written(part, path, declared, required, further)


def _inside(path: str, *names: str) -> str:
    return "/".join((path, *(name.replace("~", "~0").replace("/", "~1") for name in names)))


def _allowed_names(part: Schema, path: str, reader: PartReader) -> Node | None:
    """What `propertyNames` allows; None: any name."""
    path = f"{path}/propertyNames"
    names = reader.resolved(part.get("propertyNames", True), path)
    if isinstance(names, bool):
        return None if names else _NO_NAME
    if not isinstance(names, dict):
        raise SchemaError("a schema must be an object or a boolean", path)
    for name in sorted(names.keys() - _NAME_KEYWORDS - _ANNOTATIONS):
        raise cannot_enforce(f"'{name}' in 'propertyNames'", path)
    if names.get("format") in FORMATS:
        raise cannot_enforce("'format' in 'propertyNames'", path)
    if "string" not in names.get("type", "string"):
        return _NO_NAME
    node = string_node(names, path)
    if "enum" not in names and "const" not in names:
        return node
    values = [names["const"]] if "const" in names else listed(names, "enum", path)
    kept = [value for value in values if isinstance(value, str) and _is_allowed(value, node)]
    return Choice(tuple(_literal(value) for value in kept))


def _literal(text: str) -> Node:
    return Join(tuple(Chars(((ord(character), ord(character)),)) for character in text))


def _without(names: Node, declared: Iterable[str], path: str) -> Node:
    """`names` but those that are declared."""
    found = [name for name in declared if _is_allowed(name, names)]
    try:
        return restricted(names, Choice(tuple(map(_literal, found))), is_excluded=True) if found else names
    except PatternError as error:
        raise cannot_enforce(f"'propertyNames' beside 'properties' ({error})", path) from None


def _is_allowed(name: str, names: Node | None) -> bool:
    if names is None:
        return True
    spelling = spelled(names, ANYTHING)
    return spelling is not None and re.fullmatch(spelling, name) is not None


def _further(part: Schema, path: str, reader: PartReader, names: Node | None) -> _Further:
    """What the object may have besides `properties`; if it declares any and says nothing else, nothing."""
    patterns = mapped(part, "patternProperties", path)
    is_open = part.get("additionalProperties", not patterns and "properties" not in part)
    if not patterns:
        return _Further(reader.read(is_open, f"{path}/additionalProperties"), names)
    if names is not None:
        raise cannot_enforce("'propertyNames' beside 'patternProperties'", path)
    if is_open is not False:
        raise cannot_enforce("'additionalProperties' beside 'patternProperties'", path)
    found = []
    for pattern, each in patterns.items():
        inside = _inside(path, "patternProperties", pattern)
        node = pattern_node(pattern, inside)
        if (value := reader.read(each, inside)) is not None:
            found.append((node, value))
    if any(value != found[0][1] for _, value in found):
        raise cannot_enforce("several 'patternProperties' with different schemas", path)
    return _Further(found[0][1] if found else None, Choice(tuple(node for node, _ in found)))


def _check_one_schema(name: str, value: Schema, further: _Further, path: str) -> None:
    """Raises SchemaError for a declared property that may have another schema too, by its name."""
    if further.has(name) and further.value != value:
        raise cannot_enforce(f"a pattern of names that the declared property {name!r:.60} fits", path)


def _required(part: Schema, path: str) -> list[str]:
    names = listed(part, "required", path)
    if not all(isinstance(name, str) for name in names):
        raise SchemaError("'required' must be an array of names", path)
    return list(dict.fromkeys(names))


def _undeclared(name: str, part: Schema, path: str, names: Node | None, further: _Further) -> Schema:
    """The schema of a required property that the object does not declare. Raises SchemaError."""
    if further.has(name):
        assert further.value is not None
        return further.value
    is_closed = part.get("additionalProperties") is False or name in part.get("properties", {})
    if is_closed or not _is_allowed(name, names):
        raise SchemaError(f"no value fits: the required property {name!r:.60} is not allowed", path)
    return {}


def _written(
    part: Schema, path: str, declared: dict[str, Schema], required: list[str], further: _Further
) -> Schema:
    low, high = bounds(part, "minProperties", "maxProperties", path)
    has_further = further.value is not None and further.names != _NO_NAME
    if high is not None and len(required) > high:
        raise SchemaError(
            f"no value fits: {len(required)} properties are required, 'maxProperties' is {high}", path
        )
    if not has_further and low > len(declared):
        raise SchemaError(f"no value fits: 'minProperties' is {low}, {len(declared)} are declared", path)
    found: dict[str, Any] = {"additionalProperties": False}
    if declared or "properties" in part:
        found["properties"] = declared
    if required:
        found["required"] = required
    if has_further and further.names is None and not declared:
        found["additionalProperties"] = further.value or True
    elif has_further:
        names = all_but(declared) if further.names is None else further.names
        found["patternProperties"] = {spelled_pattern(names, path): further.value}
    if low > len(required):
        found["minProperties"] = low
    if high is not None:
        found["maxProperties"] = high
    return found
