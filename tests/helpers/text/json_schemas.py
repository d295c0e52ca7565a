"""Random JSON schemas, and the check whether a value is valid by one."""

import random
import re
from typing import Any

_DEPTH = 3
_PATTERNS = ("[a-f]{2,5}", "(yes|no)", "[0-9]{3}-[0-9]{2}", "x+y?")
_NAMES = ("name", "age", "tags", "Ä", "a b", 'qu"ote', "next", "id")


def random_schema(draw: random.Random, depth: int = _DEPTH) -> dict[str, Any]:
    """A schema whose values are finite: every string and array has a bound."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth:
        kinds += 3 * ["object"] + 2 * ["array", "anyOf", "tuple"]
    kind = draw.choice(kinds)
    match kind:
        case "string":
            low = draw.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + draw.randrange(8)}
        case "integer":
            low = draw.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(200)}
        case "number":
            return {"type": "number", "minimum": draw.randrange(-9, 0), "maximum": draw.randrange(1, 9)}
        case "enum":
            return {"enum": draw.sample(["a", "b\n", 3, True, None, "ж"], draw.randrange(1, 5))}
        case "const":
            return {"const": draw.choice(["only", 7, False])}
        case "pattern":
            return {"type": "string", "pattern": f"^{draw.choice(_PATTERNS)}$"}
        case "object":
            names = draw.sample(_NAMES, draw.randrange(1, 5))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth - 1) for name in names},
                "required": [name for name in names if draw.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            low = draw.randrange(3)
            bounds = {"minItems": low, "maxItems": low + draw.randrange(3)}
            return {"type": "array", "items": random_schema(draw, depth - 1)} | bounds
        case "tuple":
            items = [random_schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(2)]}
    return {"type": kind}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether `value` is valid by a schema of `random_schema`."""
    if "anyOf" in schema:
        return any(is_valid(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    if "const" in schema:
        return type(value) is type(schema["const"]) and bool(value == schema["const"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer" | "number" as kind:
            is_number = isinstance(value, int if kind == "integer" else (int, float))
            in_range = (
                schema.get("minimum", value) <= value <= schema.get("maximum", value) if is_number else 0
            )
            return is_number and not isinstance(value, bool) and bool(in_range)
        case "string":
            return isinstance(value, str) and _is_valid_text(value, schema)
        case "array":
            return isinstance(value, list) and _is_valid_array(value, schema)
        case "object":
            return isinstance(value, dict) and _is_valid_object(value, schema)
    raise AssertionError(f"no schema of `random_schema`: {schema}")


def _is_valid_text(value: str, schema: dict[str, Any]) -> bool:
    if "pattern" in schema:
        return re.search(schema["pattern"], value) is not None
    return bool(schema["minLength"] <= len(value) <= schema["maxLength"])


def _is_valid_array(value: list[Any], schema: dict[str, Any]) -> bool:
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        return len(value) == len(items) and all(map(is_valid, value, items))
    bounded = schema["minItems"] <= len(value) <= schema["maxItems"]
    return bounded and all(is_valid(item, schema["items"]) for item in value)


def _is_valid_object(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    properties = schema["properties"]
    return {*schema["required"]} <= value.keys() <= properties.keys() and all(
        is_valid(item, properties[name]) for name, item in value.items()
    )
