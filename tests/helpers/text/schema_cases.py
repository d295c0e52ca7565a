"""Random JSON schemas of the kinds of the JSON-Schema test suite, and instances to try.

They leave out what docs/use/http-api.md lists as differences to a validator: names are in alphabetical order,
the undeclared ones last, and constrained strings need no escape sequences.
"""

import random
import re
from typing import Any

Schema = dict[str, Any] | bool

_DECLARED = ("a", "b", "c d", "cé", "k/e~y", 'qu"o')
_FURTHER = ("x1", "x_2", "y", "zz")
_TEXTS = (
    "",
    "a",
    "b",
    "ab",
    "ba",
    "aab",
    "x1",
    "x_2",
    "0",
    "12",
    "a-b",
    "é",
    "\U0001f600b",
    "https://a",
    "a b",
)
_ESCAPED = ('"', "a\nb", "\\", "\u0001")
_NUMBERS = (0, 1, -1, 2, 3, 5, 7, 10, -10, 99, 100, 12345, 0.5, -0.5, 1.5, 2.25, -2.75, 3.000001, 0.1)
_SCALARS = (None, True, False, *_TEXTS, *_NUMBERS)
_PATTERNS = (
    *(
        "^a",
        "b$",
        "^[ab]{1,2}$",
        "a|^0",
        "(?:^|-)b",
        "^(a|b)+$",
        "\\d",
        "^[a-z\\d]+$",
        "[^a]",
        "^https?://",
        "",
    ),
    *(
        "^\\S*$",
        "^.$",
        "x_?\\d",
        "^(?:a(?:b|$))",
        "^\\u0061.*",
        "^[^\\s-]{2,}$",
        "\\Aa",
        "a\\Z",
        "^(?!a)",
        "^(?=.*b)a",
    ),
)


def random_schema(draw: random.Random, depth: int = 3) -> Schema:
    """A schema; it may refer to `#/$defs/d`, which `with_definitions` adds."""
    kinds = ["string", "string", "integer", "number", "constant", "simple", "types", "any"]
    if depth:
        kinds += 3 * ["object", "array"] + ["names", "patterns", "anyOf", "allOf", "ref"]
    kind = draw.choice(kinds)
    made: Schema = _MAKERS[kind](draw, depth)
    if isinstance(made, dict) and draw.random() < 0.1:
        made |= {"title": "t", "default": 3, "examples": []}
    return made


def with_definitions(schema: Schema, draw: random.Random) -> Schema:
    """`schema` with what it refers to."""
    if isinstance(schema, bool):
        return schema
    leaf = random_schema(draw, 0)
    tree = {"properties": {"a": leaf, "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/d"}]}}}
    return schema | {"$defs": {"d": {"type": "object", "additionalProperties": False} | tree}}


def random_instance(draw: random.Random, schema: Schema, root: Schema, depth: int = 6) -> Any:
    """A value that probably is valid."""
    if isinstance(schema, bool) or depth < 0:
        return draw.choice(_SCALARS)
    if "$ref" in schema:
        assert isinstance(root, dict)
        return random_instance(draw, root["$defs"]["d"], root, depth - 1)
    for name in ("anyOf", "allOf"):
        if name in schema:
            return random_instance(draw, draw.choice(schema[name]), root, depth - 1)
    if "enum" in schema or "const" in schema:
        return draw.choice(schema.get("enum", [schema.get("const")]))
    types = schema.get("type", "any")
    match draw.choice(types) if isinstance(types, list) else types:
        case "string":
            return draw.choice(
                _TEXTS if {"pattern", "minLength", "maxLength"} & schema.keys() else _TEXTS + _ESCAPED
            )
        case "integer":
            return draw.choice([value for value in _NUMBERS if isinstance(value, int)])
        case "number":
            return draw.choice(_NUMBERS)
        case "boolean":
            return draw.random() < 0.5
        case "null":
            return None
        case "array":
            return _array(draw, schema, root, depth)
        case "object":
            return _object(draw, schema, root, depth)
    return draw.choice([*_SCALARS, *_ESCAPED, [], {}, [1, "a"], {"a": [None]}])


def mutated(draw: random.Random, value: Any) -> Any:
    """`value` with one change, somewhere inside."""
    if isinstance(value, list) and value and draw.random() < 0.8:
        changed = list(value)
        index = draw.randrange(len(value))
        match draw.randrange(3):
            case 0:
                del changed[index]
            case 1:
                changed.insert(index, draw.choice(_SCALARS))
            case _:
                changed[index] = mutated(draw, value[index])
        return changed
    if isinstance(value, dict) and draw.random() < 0.8:
        fields = dict(value)
        if fields and draw.random() < 0.7:
            name = draw.choice(sorted(fields))
            old = fields.pop(name)
            return fields if draw.random() < 0.5 else fields | {name: mutated(draw, old)}
        return fields | {draw.choice(_FURTHER): draw.choice(_SCALARS)}
    return draw.choice([*_SCALARS, [], {}, [None], {"a": 1}])


def _bounds(draw: random.Random, least: str, most: str, limit: int) -> dict[str, int]:
    low = draw.randrange(limit)
    both = {least: low, most: low + draw.randrange(limit)}
    return {name: value for name, value in both.items() if draw.random() < 0.5}


def _string(draw: random.Random, depth: int) -> Schema:
    match draw.randrange(3):
        case 0:
            return {"type": "string"}
        case 1:
            return {"type": "string"} | _bounds(draw, "minLength", "maxLength", 4)
    bounds = _bounds(draw, "minLength", "maxLength", 4) if draw.random() < 0.2 else {}
    return {"type": "string", "pattern": draw.choice(_PATTERNS)} | bounds


def _number_bounds(draw: random.Random, values: list[float]) -> dict[str, float]:
    low, high = sorted(draw.sample(values, 2))
    least = draw.choice(["minimum", "exclusiveMinimum"])
    most = draw.choice(["maximum", "exclusiveMaximum"])
    return {name: value for name, value in {least: low, most: high}.items() if draw.random() < 0.6}


def _integer(draw: random.Random, depth: int) -> Schema:
    return {"type": "integer"} | _number_bounds(draw, [-1000, -10, -1.5, 0, 2, 4.25, 10, 99, 12345])


def _number(draw: random.Random, depth: int) -> Schema:
    return {"type": "number"} | _number_bounds(
        draw, [-1000.5, -10, -0.5, 0, 0.1, 1, 2.25, 3.000001, 99, 5000]
    )


def _constant(draw: random.Random, depth: int) -> Schema:
    values: list[Any] = [*_SCALARS, *_ESCAPED, [], [1, "a"], {"a": None, "b": [0.5]}]
    if draw.random() < 0.3:
        return {"const": draw.choice(values)}
    return {"enum": draw.sample(values, draw.randrange(1, 6))}


def _simple(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(["boolean", "null", "array", "object", "number", "integer"])}


def _types(draw: random.Random, depth: int) -> Schema:
    kinds = draw.sample(["string", "integer", "number", "boolean", "null", "array", "object"], 3)
    found: dict[str, Any] = {"type": kinds}
    for kind in kinds:
        if kind in ("string", "integer", "array", "object") and "number" not in kinds:
            one = _MAKERS[kind](draw, depth - 1 if depth else 0)
            assert isinstance(one, dict)
            found = one | found
    return found


def _any(draw: random.Random, depth: int) -> Schema:
    return draw.choice([True, {}])


def _array_schema(draw: random.Random, depth: int) -> Schema:
    found: dict[str, Any] = {"type": "array"}
    if draw.random() < 0.4:
        found["prefixItems"] = [random_schema(draw, max(depth - 1, 0)) for _ in range(draw.randrange(1, 4))]
    if draw.random() < 0.7:
        found["items"] = (
            draw.choice([True, False]) if draw.random() < 0.2 else random_schema(draw, max(depth - 1, 0))
        )
    return found | _bounds(draw, "minItems", "maxItems", 3)


def _object_schema(draw: random.Random, depth: int) -> Schema:
    names = sorted(draw.sample(_DECLARED, draw.randrange(4)))
    required = [name for name in names if draw.random() < 0.4]
    found: dict[str, Any] = {"type": "object"}
    found["properties"] = {name: random_schema(draw, max(depth - 1, 0)) for name in names}
    if required:
        found["required"] = required
    further = draw.choice([False, False, True, random_schema(draw, 0)])
    if further is False and names and draw.random() < 0.1:
        found["properties"][draw.choice(names)] = False
    return found | {"additionalProperties": further} | _bounds(draw, "minProperties", "maxProperties", 3)


def _names(draw: random.Random, depth: int) -> Schema:
    names: Schema = draw.choice(
        [{"pattern": "^x"}, {"enum": ["x1", "y", 3]}, {"maxLength": 2}, {"const": "zz"}, {"type": "string"}]
    )
    declared = {name: random_schema(draw, 0) for name in ("a", "x0") if draw.random() < 0.3}
    further = random_schema(draw, depth - 1)
    return {"type": "object", "propertyNames": names, "additionalProperties": further, "properties": declared}


def _patterns(draw: random.Random, depth: int) -> Schema:
    names = sorted(draw.sample(_DECLARED, draw.randrange(3)))
    patterns = draw.choice([["^x"], ["^[x-z]"], ["_"], ["^x", "^[yz]"], ["^y$", "^z", "^x1$"]])
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth - 1) for name in names},
        "patternProperties": {pattern: random_schema(draw, depth - 1) for pattern in patterns},
        "additionalProperties": False,
        "required": [name for name in names if draw.random() < 0.4],
    }


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]}


def _all_of(draw: random.Random, depth: int) -> Schema:
    return {"allOf": [random_schema(draw, depth - 1)]}


def _reference(draw: random.Random, depth: int) -> Schema:
    return {"$ref": "#/$defs/d"}


_MAKERS = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "constant": _constant,
    "simple": _simple,
    "types": _types,
    "any": _any,
    "array": _array_schema,
    "object": _object_schema,
    "names": _names,
    "patterns": _patterns,
    "anyOf": _any_of,
    "allOf": _all_of,
    "ref": _reference,
}


def _array(draw: random.Random, schema: dict[str, Any], root: Schema, depth: int) -> list[Any]:
    low = schema.get("minItems", 0)
    count = draw.randint(low, schema.get("maxItems", low + 3))
    prefix = schema.get("prefixItems", [])
    parts = [*prefix, *[schema.get("items", True)] * count][:count]
    return [random_instance(draw, part, root, depth - 1) for part in parts]


def _object(draw: random.Random, schema: dict[str, Any], root: Schema, depth: int) -> dict[str, Any]:
    required = schema.get("required", ())
    found = {
        name: random_instance(draw, part, root, depth - 1)
        for name, part in schema.get("properties", {}).items()
        if name in required or draw.random() < 0.6
    }
    patterns = schema.get("patternProperties", {})
    others = schema.get("additionalProperties", True)
    for name in draw.sample(_FURTHER, draw.randrange(3)):
        further = next((part for pattern, part in patterns.items() if re.search(pattern, name)), others)
        if further is not False:
            found[name] = random_instance(draw, further, root, depth - 1)
    return found
