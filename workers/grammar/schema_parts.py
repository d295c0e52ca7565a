"""The keywords of strings, numbers and arrays, as xgrammar reads them right; and what all keywords need.

A path is a JSON pointer into the client's schema: "#/properties/age".
"""

import math
from fractions import Fraction
from typing import Any, Protocol

from workers.grammar.automata import restricted
from workers.grammar.expressions import ANYTHING, Chars, Node, Repeat
from workers.grammar.patterns import PLAIN, PatternError, found_anywhere, spelled

__all__ = [
    "ARRAY_KEYWORDS",
    "FORMATS",
    "NUMBER_KEYWORDS",
    "OBJECT_KEYWORDS",
    "STRING_KEYWORDS",
    "PartReader",
    "Schema",
    "SchemaError",
    "array_keywords",
    "bounds",
    "cannot_enforce",
    "integer_keywords",
    "is_exact_bound",
    "listed",
    "mapped",
    "number_keywords",
    "pattern_node",
    "spelled_pattern",
    "string_keywords",
    "string_node",
]

Schema = dict[str, Any]

OBJECT_KEYWORDS = frozenset(
    {
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    }
)
ARRAY_KEYWORDS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
STRING_KEYWORDS = frozenset({"pattern", "format", "minLength", "maxLength"})
NUMBER_KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"),
        *("uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
"""Those that xgrammar enforces; others are annotations."""

_MAX_INTEGER = 2**63 - 1
_MAX_BOUND = 2**53
_DECIMALS = 10**6  # xgrammar reads a number's bounds to six decimals
_MAX_PATH = 160


class SchemaError(ValueError):
    """A schema that cannot be honoured; the text is for the client."""

    def __init__(self, what: str, path: str):
        self.what = what
        self.path = path
        shown = path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}…"
        super().__init__(f"{what}, at {shown}")


class PartReader(Protocol):
    """Reads the parts of a schema that are inside of another."""

    def read(self, value: Any, path: str) -> Schema | None:
        """The part at `path`, for xgrammar; None: it is `false`, which no value fits."""

    def resolved(self, value: Any, path: str) -> Any:
        """The part itself, or what its `$ref` names."""


def cannot_enforce(what: str, path: str) -> SchemaError:
    return SchemaError(f"the schema uses {what}, which this server cannot enforce", path)


def listed(part: Schema, name: str, path: str) -> list[Any]:
    """The array `name`; empty if the part has none. Raises SchemaError for another value."""
    value = part.get(name, [])
    if not isinstance(value, list):
        raise SchemaError(f"'{name}' must be an array", path)
    return value


def mapped(part: Schema, name: str, path: str) -> dict[str, Any]:
    """The object `name`; empty if the part has none. Raises SchemaError for another value."""
    value = part.get(name, {})
    if not isinstance(value, dict):
        raise SchemaError(f"'{name}' must be an object", path)
    return value


def bounds(part: Schema, least: str, most: str, path: str) -> tuple[int, int | None]:
    """The two counts, such as minItems and maxItems. Raises SchemaError if nothing lies between them."""
    low = _count(part, least, path) or 0
    high = _count(part, most, path)
    if high is not None and low > high:
        raise SchemaError(f"no value fits: '{least}' {low} is greater than '{most}' {high}", path)
    return low, high


def _count(part: Schema, name: str, path: str) -> int | None:
    value = part.get(name)
    if name not in part:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SchemaError(f"'{name}' must be a whole number, 0 or more", path)
    return value


def string_node(part: Schema, path: str) -> Node | None:
    """What `pattern`, or `minLength` and `maxLength`, allow; None: any string. Raises SchemaError."""
    low, high = bounds(part, "minLength", "maxLength", path)
    if "pattern" in part:
        pattern = part["pattern"]
        if not isinstance(pattern, str):
            raise SchemaError("'pattern' must be a string", path)
        node = pattern_node(pattern, f"{path}/pattern")
        return _of_length(node, low, high, path) if low or high is not None else node
    return Repeat(Chars(ANYTHING), low, high) if low or high is not None else None


def _of_length(node: Node, low: int, high: int | None, path: str) -> Node:
    try:
        return restricted(node, Repeat(Chars(ANYTHING), low, high), is_excluded=False)
    except PatternError as error:
        raise cannot_enforce(f"'minLength' or 'maxLength' next to 'pattern' ({error})", path) from None


def pattern_node(pattern: str, path: str) -> Node:
    """What a string is in which `pattern` is found. Raises SchemaError."""
    try:
        return found_anywhere(pattern)
    except PatternError as error:
        raise SchemaError(f"the pattern cannot be used: {error}", path) from None


def spelled_pattern(node: Node, path: str) -> str:
    """`node` as a pattern for xgrammar, which excludes escape sequences. Raises SchemaError."""
    spelling = spelled(node, PLAIN)
    if spelling is None and spelled(node, ANYTHING) is None:
        raise SchemaError("no value fits: no string matches the pattern", path)
    if spelling is None:
        raise cannot_enforce("a pattern that needs quotes, backslashes or control characters", path)
    return spelling


def string_keywords(part: Schema, path: str) -> Schema:
    """For xgrammar. It drops `pattern` next to `format`: `pattern` counts. Raises SchemaError."""
    form = part.get("format")
    if not isinstance(form, str | None):
        raise SchemaError("'format' must be a string", path)
    node = string_node(part, path)
    if node is None:
        return {"format": form} if form in FORMATS else {}
    if "pattern" not in part and form in FORMATS:
        raise cannot_enforce("'minLength' or 'maxLength' next to 'format'", path)
    return {"pattern": spelled_pattern(node, path)}


def integer_keywords(part: Schema, path: str) -> Schema:
    """The bounds as `minimum` and `maximum` of 64 bits. Raises SchemaError."""
    low, high = _limits(part, path)
    least = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
    most = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
    if least is not None and most is not None and least > most:
        raise SchemaError("no value fits: there is no integer between the bounds", path)
    if (least or 0) > _MAX_INTEGER or (most or 0) < -_MAX_INTEGER:
        raise cannot_enforce("a bound of more than 64 bits", path)
    found = {"minimum": least, "maximum": most}
    return {
        name: max(-_MAX_INTEGER, min(value, _MAX_INTEGER))
        for name, value in found.items()
        if value is not None
    }


def number_keywords(part: Schema, path: str) -> Schema:
    """The bounds, narrowed to what xgrammar reads of them. Raises SchemaError."""
    low, high = _limits(part, path)
    found: Schema = {}
    least = most = None
    if low is not None:
        least = max(Fraction(math.ceil(low[0] * _DECIMALS), _DECIMALS), Fraction(-_MAX_BOUND))
        is_exclusive = low[1] and least == low[0]
        found["exclusiveMinimum" if is_exclusive else "minimum"] = _written(least)
    if high is not None:
        most = min(Fraction(math.floor(high[0] * _DECIMALS), _DECIMALS), Fraction(_MAX_BOUND))
        is_exclusive = high[1] and most == high[0]
        found["exclusiveMaximum" if is_exclusive else "maximum"] = _written(most)
    is_open = any(name.startswith("exclusive") for name in found)
    if least is not None and most is not None and (least > most or (least == most and is_open)):
        raise SchemaError("no value fits: there is no number of six decimals between the bounds", path)
    if (least or 0) > _MAX_BOUND or (most or 0) < -_MAX_BOUND:
        raise cannot_enforce("a bound of a number that is greater than 2**53", path)
    return found


def _written(bound: Fraction) -> int | float:
    return bound.numerator if bound.denominator == 1 else float(bound)


def is_exact_bound(value: float) -> bool:
    """Whether xgrammar reads a bound of a number as it is."""
    return abs(value) < _MAX_BOUND and (Fraction(str(value)) * _DECIMALS).denominator == 1


def _limits(part: Schema, path: str) -> tuple[tuple[Fraction, bool] | None, tuple[Fraction, bool] | None]:
    """(bound, whether it is excluded) of both sides; None where there is none."""
    lows = [(_number(part, "minimum", path), False), (_number(part, "exclusiveMinimum", path), True)]
    highs = [(_number(part, "maximum", path), False), (_number(part, "exclusiveMaximum", path), True)]
    low = max(((value, is_open) for value, is_open in lows if value is not None), default=None)
    high = min(
        ((value, is_open) for value, is_open in highs if value is not None),
        key=lambda limit: (limit[0], not limit[1]),
        default=None,
    )
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        raise SchemaError("no value fits: the lower bound is not below the upper bound", path)
    return low, high


def _number(part: Schema, name: str, path: str) -> Fraction | None:
    if name not in part:
        return None
    value = part[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SchemaError(f"'{name}' must be a number", path)
    return Fraction(str(value))


def array_keywords(part: Schema, path: str, reader: PartReader) -> Schema:
    """For xgrammar, which takes absent `items` for `false`. Raises SchemaError."""
    low, high = bounds(part, "minItems", "maxItems", path)
    if isinstance(part.get("items"), list):
        raise SchemaError("'items' must be a schema: a list of schemas is 'prefixItems'", path)
    items = reader.read(part.get("items", True), f"{path}/items")
    prefix: list[Schema] = []
    for index, each in enumerate(listed(part, "prefixItems", path)):
        item = reader.read(each, f"{path}/prefixItems/{index}")
        if item is None:
            high = index if high is None else min(high, index)
            break
        prefix.append(item)
    if items is None:
        high = len(prefix) if high is None else min(high, len(prefix))
    if high is not None and low > high:
        raise SchemaError(f"no value fits: 'minItems' is {low}, and there can be {high} items", path)
    prefix = prefix[:high]
    if high == len(prefix):
        items = None
    found: Schema = {"items": False if items is None else items}
    if prefix:
        found["prefixItems"] = prefix
    if low:
        found["minItems"] = low
    if high is not None and items is not None:
        found["maxItems"] = high
    return found
