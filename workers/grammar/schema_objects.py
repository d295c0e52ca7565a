"""The keywords of objects, as xgrammar reads them right.

An object has what it declares, in the order of the schema, and then further properties of one kind: of any
names, of those that `propertyNames` allows, or of those that fit `patternProperties`.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
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
_MAX_PAIRS = 200
_PLAIN_NAME = re.compile(r"[ !#-\[\]-~]*")
"""A declared name that xgrammar excludes from further ones; not one with other characters."""


@dataclass(frozen=True)
class _Names:
    """Names of properties."""

    node: Node

    @cached_property
    def _expression(self) -> re.Pattern[str] | None:
        spelling = spelled(self.node, ANYTHING)
        return None if spelling is None else re.compile(spelling)

    @property
    def is_empty(self) -> bool:
        return self._expression is None

    def __contains__(self, name: str) -> bool:
        return self._expression is not None and self._expression.fullmatch(name) is not None


@dataclass(frozen=True)
class _Further:
    """Properties that an object may have without declaring them: names, None for any, and what they are.

    A value of None excludes the names.
    """

    kinds: tuple[tuple[_Names | None, Schema | None], ...]

    def value(self, name: str) -> Schema | None:
        """What a property of this name is; None: there cannot be one."""
        return next((value for names, value in self.kinds if names is None or name in names), None)

    def excludes(self, name: str) -> bool:
        """Whether no property, declared or not, may have this name."""
        return any(names is not None and value is None and name in names for names, value in self.kinds)


def object_keywords(part: Schema, path: str, reader: PartReader) -> Schema:
    """For xgrammar. Raises SchemaError."""
    names = _allowed_names(part, path, reader)
    further = _further(part, path, reader, names)
    declared: dict[str, Schema] = {}
    for name, each in mapped(part, "properties", path).items():
        value = reader.read(each, _inside(path, "properties", name))
        if value is not None and not further.excludes(name) and (names is None or name in names):
            declared[name] = value
            if "patternProperties" in part:
                _check_one_schema(name, value, further, path)
        elif further.value(name) is not None:
            raise cannot_enforce(f"further properties next to the excluded property {name!r:.60}", path)
    required = _required(part, path)
    for name in required:
        if name not in declared:
            declared[name] = _undeclared(name, part, path, names, further, reader)
    if names is not None and (found := [name for name in declared if name in names]):
        further = _Further(((_without(names, found, path), further.kinds[0][1]),))
    return _written(part, path, declared, required, further)


def _inside(path: str, *names: str) -> str:
    return "/".join((path, *(name.replace("~", "~0").replace("/", "~1") for name in names)))


def _allowed_names(part: Schema, path: str, reader: PartReader) -> _Names | None:
    """What `propertyNames` allows; None: any name."""
    path = f"{path}/propertyNames"
    names = reader.resolved(part.get("propertyNames", True), path)
    if isinstance(names, bool):
        return None if names else _Names(_NO_NAME)
    if not isinstance(names, dict):
        raise SchemaError("a schema must be an object or a boolean", path)
    for name in sorted(names.keys() - _NAME_KEYWORDS - _ANNOTATIONS):
        raise cannot_enforce(f"'{name}' in 'propertyNames'", path)
    if names.get("format") in FORMATS:
        raise cannot_enforce("'format' in 'propertyNames'", path)
    if "string" not in names.get("type", "string"):
        return _Names(_NO_NAME)
    node = string_node(names, path)
    allowed = None if node is None else _Names(node)
    if "enum" not in names and "const" not in names:
        return allowed
    values = [names["const"]] if "const" in names else listed(names, "enum", path)
    kept = [value for value in values if isinstance(value, str) and (allowed is None or value in allowed)]
    return _Names(Choice(tuple(map(_literal, kept))))


def _literal(text: str) -> Node:
    return Join(tuple(Chars(((ord(character), ord(character)),)) for character in text))


def _without(names: _Names, declared: list[str], path: str) -> _Names:
    """`names` but those that are declared."""
    try:
        return _Names(restricted(names.node, Choice(tuple(map(_literal, declared))), is_excluded=True))
    except PatternError as error:
        raise cannot_enforce(f"'propertyNames' next to 'properties' ({error})", path) from None


def _further(part: Schema, path: str, reader: PartReader, names: _Names | None) -> _Further:
    """What the object may have besides `properties`; if it declares any and says nothing else, nothing."""
    patterns = mapped(part, "patternProperties", path)
    is_open = part.get("additionalProperties", not patterns and "properties" not in part)
    if not patterns:
        return _Further(((names, reader.read(is_open, f"{path}/additionalProperties")),))
    if names is not None:
        raise cannot_enforce("'propertyNames' next to 'patternProperties'", path)
    if is_open is not False:
        raise cannot_enforce("'additionalProperties' next to 'patternProperties'", path)
    kinds = []
    for pattern, each in patterns.items():
        inside = _inside(path, "patternProperties", pattern)
        kinds.append((_Names(pattern_node(pattern, inside)), reader.read(each, inside)))
    _check_disjoint(kinds, path)
    return _Further(tuple(kinds))


def _check_disjoint(kinds: list[tuple[_Names, Schema | None]], path: str) -> None:
    """Raises SchemaError where a name may fit two patterns with different schemas."""
    pairs = [(one, other) for one, other in combinations(kinds, 2) if one[1] != other[1]]
    if len(pairs) > _MAX_PAIRS:
        raise cannot_enforce("so many 'patternProperties'", path)
    for (one, _), (other, _) in pairs:
        try:
            common = restricted(one.node, other.node, is_excluded=False)
        except PatternError as error:
            raise cannot_enforce(f"several 'patternProperties' ({error})", path) from None
        if common != _NO_NAME:
            raise cannot_enforce("several 'patternProperties' that one name may fit", path)


def _check_one_schema(name: str, value: Schema, further: _Further, path: str) -> None:
    """Raises SchemaError for a declared property that may have another schema too, by its name."""
    if further.value(name) not in (None, value):
        raise cannot_enforce(f"a pattern of names that the declared property {name!r:.60} fits", path)


def _required(part: Schema, path: str) -> list[str]:
    names = listed(part, "required", path)
    if not all(isinstance(name, str) for name in names):
        raise SchemaError("'required' must be an array of names", path)
    return list(dict.fromkeys(names))


def _undeclared(
    name: str, part: Schema, path: str, names: _Names | None, further: _Further, reader: PartReader
) -> Schema:
    """The schema of a required property that the object does not declare. Raises SchemaError."""
    if (value := further.value(name)) is not None:
        return value
    is_closed = part.get("additionalProperties") is False or name in part.get("properties", {})
    if is_closed or further.excludes(name) or (names is not None and name not in names):
        raise SchemaError(f"no value fits: the required property {name!r:.60} is not allowed", path)
    anything = reader.read(True, _inside(path, "properties", name))
    assert anything is not None, "any value fits"
    return anything


def _written(
    part: Schema, path: str, declared: dict[str, Schema], required: list[str], further: _Further
) -> Schema:
    low, high = bounds(part, "minProperties", "maxProperties", path)
    kinds = [
        (names, value)
        for names, value in further.kinds
        if value is not None and (names is None or not names.is_empty)
    ]
    if high is not None and len(required) > high:
        raise SchemaError(
            f"no value fits: {len(required)} properties are required, 'maxProperties' is {high}", path
        )
    if not kinds and low > len(declared):
        raise SchemaError(f"no value fits: 'minProperties' is {low}, {len(declared)} are declared", path)
    found: dict[str, Any] = {"additionalProperties": False}
    if declared or "properties" in part:
        found["properties"] = declared
    if required:
        found["required"] = required
    patterns = {}
    for names, value in kinds:
        if names is None and all(map(_PLAIN_NAME.fullmatch, declared)):  # much less to compile
            found["additionalProperties"] = value or True
        else:
            node = all_but(declared) if names is None else names.node
            patterns[spelled_pattern(node, path)] = value
    if patterns:
        found["patternProperties"] = patterns
    if low > len(required):
        found["minProperties"] = low
    if high is not None:
        found["maxProperties"] = high
    return found
