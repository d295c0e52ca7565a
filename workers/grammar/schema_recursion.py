"""Prepared schemas that refer to themselves: whether a value can be complete."""

from collections.abc import Mapping, Sequence

from workers.grammar.schema_parts import Schema, SchemaError

__all__ = ["check_finite"]


def check_finite(parts: Sequence[tuple[Schema, str]], targets: Mapping[str, Schema]) -> None:
    """Check each part, which comes with its path, and after the parts inside of it.

    `targets` are the parts that each `$ref` names. Raises SchemaError for one that refers to itself without a
    token in between, and for one of which a value would need a value of the same part inside.
    """
    paths = {id(part): path for part, path in parts}
    _check_progress(parts, paths, targets)
    finite: set[int] = set()
    left = [part for part, _ in parts]
    while True:
        remaining = [part for part in left if not _is_finite(part, finite, targets)]
        if len(remaining) == len(left):
            break
        left = remaining[::-1]  # chains of references go in either direction
    if left:
        culprit = _culprit({id(part): part for part in left}, targets)
        raise SchemaError(
            "no value fits: each would need another one of the same schema inside", paths[culprit]
        )


def _alternatives(part: Schema, targets: Mapping[str, Schema]) -> list[Schema]:
    """The parts one of which a value of `part` fits, as a whole."""
    if "$ref" in part:
        return [targets[part["$ref"]]]
    alternatives: list[Schema] = part.get("anyOf", [])
    return alternatives


def _check_progress(
    parts: Sequence[tuple[Schema, str]], paths: Mapping[int, str], targets: Mapping[str, Schema]
) -> None:
    """Raises SchemaError for a part of which a value may be the same part again, as a whole."""
    ended: set[int] = set()
    for start, _ in parts:
        open_parts: set[int] = set()
        stack = [(start, False)]
        while stack:
            part, is_after = stack.pop()
            if is_after:
                open_parts.discard(id(part))
                ended.add(id(part))
            elif id(part) in open_parts:
                raise SchemaError("the schema refers to itself without progress", paths[id(part)])
            elif id(part) not in ended:
                open_parts.add(id(part))
                stack.append((part, True))
                stack += [(each, False) for each in _alternatives(part, targets)]


def _is_finite(part: Schema, finite: set[int], targets: Mapping[str, Schema]) -> bool:
    """Whether some value fits, of which all inner values are known to be finite; adds it to these."""
    alternatives = _alternatives(part, targets)
    if alternatives:
        found = any(id(each) in finite for each in alternatives)
    else:
        types = part.get("type", "null")
        kinds = {types} if isinstance(types, str) else {*types}
        found = bool(kinds - {"object", "array"})
        found = found or ("array" in kinds and all(id(each) in finite for each in _needed_items(part)))
        found = found or ("object" in kinds and _is_finite_object(part, finite))
    if found:
        finite.add(id(part))
    return found


def _needed_items(part: Schema) -> list[Schema]:
    count = part.get("minItems", 0)
    first: list[Schema] = part.get("prefixItems", [])[:count]
    return [*first, part["items"]] if count > len(first) else first


def _is_finite_object(part: Schema, finite: set[int]) -> bool:
    properties = part.get("properties", {})
    required = part.get("required", ())
    if not all(id(properties[name]) in finite for name in required):
        return False
    lacking = part.get("minProperties", 0) - len(required)
    others = sum(id(value) in finite for name, value in properties.items() if name not in {*required})
    further = [part["additionalProperties"], *part.get("patternProperties", {}).values()]
    return others >= lacking or any(each is True or id(each) in finite for each in further)


def _culprit(left: Mapping[int, Schema], targets: Mapping[str, Schema]) -> int:
    """A part that needs itself: the first one met again on a way through parts that are not finite."""
    part = next(iter(left.values()))
    met: set[int] = set()
    while id(part) not in met:
        met.add(id(part))
        inner = [*_alternatives(part, targets), *part.get("properties", {}).values()]
        inner += [*part.get("prefixItems", ()), part.get("items"), part.get("additionalProperties")]
        inner += part.get("patternProperties", {}).values()
        part = next(each for each in inner if id(each) in left)
    return id(part)
