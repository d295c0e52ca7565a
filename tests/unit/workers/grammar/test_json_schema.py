"""JSON schemas before xgrammar reads them: what it would ignore is refused, some is said in another way."""

import json
from typing import Any

import pytest

from workers.grammar.json_schema import SchemaError, prepared, prepared_tag

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "'not'"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "array", "items": {"type": "integer", "multipleOf": 3}}, "'multipleOf'"),
    ({"$ref": "#/$defs/a", "maxLength": 3, "$defs": {}}, "'maxLength' beside '$ref'"),
    ({"anyOf": [{"type": "null"}], "type": "object"}, "'type' beside 'anyOf'"),
    ({"allOf": [{}, {}]}, "'allOf' with several parts"),
    ({"minLength": 3}, "'minLength' without 'type'"),
    ({"type": "string", "pattern": "a+", "maxLength": 3}, "'maxLength' beside 'pattern'"),
    ({"type": "string", "format": "uuid", "minLength": 3}, "'minLength' beside 'pattern' or 'format'"),
    ({"type": "string", "pattern": '^"a"$'}, "quotes"),
    ({"type": "object", "required": ["a"]}, "'a'"),
    ({"type": "integer", "enum": ["a"]}, "no value of 'enum'"),
    ({"$ref": "http://a/b"}, "names no part"),
    ({"$ref": "#a"}, "names no part"),
    ({"$ref": "#/a"}, "names no part"),
    ({"$ref": 3}, "names no part"),
    ({"type": "string", "maxLength": "3}|x{1"}, "'maxLength' must be"),
    ({"type": "string", "minLength": -1}, "'minLength' must be"),
    ({"type": "object", "properties": [1]}, "'properties' must be an object"),
    ({"type": "object", "required": 3}, "'required' must be an array"),
    ({"allOf": 3}, "'allOf' must be an array"),
    ({"type": 3, "enum": [1]}, "'type' must be"),
]


@pytest.mark.parametrize(("schema", "names"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_would_be_ignored_is_refused(schema: dict[str, Any], names: str) -> None:
    for outer in (schema, {"type": "object", "properties": {"x": schema}}, {"anyOf": [{"items": schema}]}):
        with pytest.raises(SchemaError, match=names.replace("$", r"\$")):
            prepared(json.dumps(outer))


@pytest.mark.parametrize("text", ["[1", "3", '"x"', "null"])
def test_a_schema_is_an_object(text: str) -> None:
    with pytest.raises(SchemaError):
        prepared(text)


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(prepared(json.dumps(schema)))
    return made


def test_annotations_and_neutral_values_are_taken() -> None:
    schema = {
        "type": "integer",
        "title": "T",
        "default": 3,
        "examples": [1],
        "$schema": "x",
        "discriminator": {},
    }
    assert rewritten(schema) == schema
    assert rewritten({"type": "array", "uniqueItems": False, "items": True})["items"] is True


def test_an_object_that_declares_nothing_is_any_object() -> None:
    assert rewritten({"type": "object"})["additionalProperties"] is True
    assert "additionalProperties" not in rewritten({"type": "object", "properties": {}})


def test_lengths_become_a_pattern() -> None:
    made = rewritten({"type": "string", "minLength": 1, "maxLength": 3})
    assert made["pattern"].endswith("{1,3}$")
    assert not {"minLength", "maxLength"} & made.keys()


def test_what_is_referred_to_is_read_wherever_it_stands() -> None:
    reference = {"$ref": "#/components/a"}
    assert rewritten(reference | {"components": {"a": {"type": "object"}}})["components"]["a"] == {
        "type": "object",
        "additionalProperties": True,
    }
    with pytest.raises(SchemaError, match="'not'"):
        prepared(json.dumps({"anyOf": [reference, {"$ref": "#"}], "components": {"a": {"not": {}}}}))


def test_values_of_other_types_are_removed() -> None:
    assert rewritten({"type": ["string", "null"], "enum": ["a", 1, None]})["enum"] == ["a", None]
    assert rewritten({"type": "number", "const": 1})["enum"] == [1]


def test_schemas_inside_of_structural_tags() -> None:
    tag = {"format": {"tags": [{"content": {"type": "json_schema", "json_schema": {"not": {}}}}]}}
    with pytest.raises(SchemaError, match="'not'"):
        prepared_tag(json.dumps(tag), lenient=False)
    made = json.loads(prepared_tag(json.dumps(tag), lenient=True))
    content = made["format"]["tags"][0]["content"]
    assert content["json_schema"] == {"type": "object", "additionalProperties": True}
