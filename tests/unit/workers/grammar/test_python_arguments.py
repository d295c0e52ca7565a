"""Arguments as in Python, by the schema of a tool: the keys that may be written, and their values."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from workers.grammar.json_schema import prepared
from workers.grammar.python_arguments import python_arguments
from workers.grammar.schema_parts import SchemaError
from workers.grammar.structural_tags import prepared_tag

WHOLE: dict[str, Any] = {"type": "integer"}
ALL: dict[str, Any] = {"type": "object"}


def accepts(schema: dict[str, Any]) -> Callable[[str], bool]:
    """What tells whether a text is arguments for the schema."""
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    tag = {"type": "structural_tag", "format": python_arguments(prepared(schema))}
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    return lambda text: bool(_is_grammar_accept_string(grammar, text))


def of(required: str = "", closed: bool = True, **properties: Any) -> dict[str, Any]:
    return having(properties, required, closed)


def having(properties: dict[str, Any], required: str = "", closed: bool = True) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": not closed,
    }


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (of(), [""], ["a=1", " "]),
        (of("a", a=WHOLE), ["a=1"], ["", "a=1, ", "a=1, a=2", "a=1.5", "b=1"]),
        (
            of("b", a=WHOLE, b=WHOLE, c=WHOLE),
            ["b=1", "b=1, a=2", "b=1, c=2", "b=1, a=2, c=3"],
            ["", "a=1", "a=1, b=2", "b=1, c=2, a=3", "b=1a=2", "b=1,a=2"],
        ),
        (
            of(a=WHOLE, b=WHOLE, c=WHOLE),
            ["", "a=1", "b=1", "c=1", "a=1, c=2", "b=1, c=2", "a=1, b=2, c=3"],
            [", a=1", "a=1, ", "b=1, a=2", "a=1, a=2"],
        ),
        (
            of("a", closed=False, a=WHOLE),
            ["a=1", 'a=1, x="b"', "a=1, x=[1], a_=None"],
            ["", "a=1, a=2", "x=1, a=1", "a=1, 2x=1", "a=1, x-y=1"],
        ),
        (ALL, ["", "x=1", "x=1, y=2", 'x={"a": [true]}'], [", x=1", "x", "x=1 y=2"]),
        ({}, ["", "x=1"], ["1"]),
        (
            {"type": "object", "additionalProperties": WHOLE},
            ["", "x=1", "x=1, y=2"],
            ['x="a"', "x=1, y=True"],
        ),
    ],
)
def test_keys(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    fits = accepts(schema)
    assert all(map(fits, right)), [text for text in right if not fits(text)]
    assert not any(map(fits, wrong)), [text for text in wrong if fits(text)]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "boolean"}, ["True", "False"], ["true", '"True"', "None"]),
        ({"type": "null"}, ["None"], ["null", "0"]),
        ({"type": ["string", "null"]}, ['"a"', "None"], ["null", "'a'", "a"]),
        ({"anyOf": [WHOLE, {"type": "null"}]}, ["1", "None"], ["null", "True"]),
        ({"type": "string"}, ['"a, b=1)"', '"\\n\\""'], ['"a', "'a'", '"\n"']),
        ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[true, false]"], ["[True]"]),
        ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ["2", "None"]),
    ],
)
def test_values(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    fits = accepts(of("k", k=schema))
    assert all(fits(f"k={text}") for text in right)
    assert not any(fits(f"k={text}") for text in wrong)


def test_references() -> None:
    tree = of("n", n=WHOLE, children={"type": "array", "items": {"$ref": "#"}}, leaf={"$ref": "#/$defs/leaf"})
    fits = accepts({**tree, "$defs": {"leaf": of("s", s={"type": "string"})}})
    assert fits('n=1, children=[{"n": 2, "children": []}], leaf={"s": "a"}')
    assert not fits("n=1, children=[{}]") and not fits('n=1, leaf={"s": 1}')
    whole = accepts({"$ref": "#/$defs/a", "$defs": {"a": of("n", n=WHOLE)}})
    assert whole("n=1") and not whole("")
    one_of = accepts({"anyOf": [of("a", a=WHOLE), of("b", b=WHOLE)]})
    assert one_of("a=1") and one_of("b=1") and not one_of("a=1, b=1")


def test_parts_have_the_definitions_that_they_need() -> None:
    """All of them for each would take time with the cube of their number."""
    names = [f"d{number}" for number in range(200)]
    schema = having({name: {"$ref": f"#/$defs/{name}"} for name in names}, names[0])
    schema["$defs"] = {name: of("$ref", **{"$ref": WHOLE, "next": {"$ref": "#/$defs/a"}}) for name in names}
    schema["$defs"]["a"] = of(a={"$ref": "#/$defs/a"})
    assert len(json.dumps(python_arguments(prepared(schema)))) < 300_000
    fits = accepts(schema)
    assert fits('d0={"$ref": 1}, d7={"$ref": 2, "next": {"a": {}}}') and not fits('d0={"$ref": "a"}')


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        (having({"a": WHOLE, "my key": WHOLE}, "a"), "'my key' cannot be a key in Python"),
        (having({"a-b": WHOLE}), "'a-b' cannot be a key in Python"),
        ({"type": "string"}, "arguments are an object"),
        ({"type": "object", "minProperties": 1}, "'minProperties' for calls as in Python"),
        ({"type": "object", "patternProperties": {"^a$": WHOLE}}, "'patternProperties'"),
        (having({f"k{i}": WHOLE for i in range(17)}), "more than 16 properties, none of them required"),
    ],
)
def test_what_cannot_be_enforced(schema: dict[str, Any], what: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(what)):
        python_arguments(prepared(schema))

    def tag(is_lenient: bool) -> dict[str, Any]:
        part = {"type": "json_schema", "json_schema": schema, "style": "python", "tool": "go"}
        return {"type": "structural_tag", "format": {**part, "lenient": is_lenient}}

    with pytest.raises(SchemaError, match=f"the parameters of the tool 'go': .*{re.escape(what)}"):
        prepared_tag(tag(False), of_tools=True)
    found = prepared_tag(tag(True), of_tools=True)
    assert found.for_xgrammar()["format"] == python_arguments(ALL)
    (warning,) = found.warnings
    assert "the arguments of the tool 'go' may be any object" in warning


def test_only_tools_have_the_style() -> None:
    """A client's tag with it is refused as one with any other unknown style."""
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}, "style": "python"}}
    assert prepared_tag(tag).for_xgrammar()["format"]["style"] == "python"
