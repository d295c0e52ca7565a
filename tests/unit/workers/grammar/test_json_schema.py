"""JSON schemas before xgrammar reads them: what it would ignore is refused, the rest said in its way."""

import json
import re
from typing import Any

import pytest

from tests.helpers.text.byte_grammars import accepts, compile_bytes
from workers.grammar.json_schema import loaded, prepared
from workers.grammar.schema_parts import SchemaError

REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "'not'"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "array", "items": {"type": "integer", "multipleOf": 3}}, "'multipleOf'"),
    ({"$ref": "#/$defs/a", "maxLength": 3, "$defs": {}}, "'maxLength' next to '$ref'"),
    ({"anyOf": [{"type": "null"}], "type": "object"}, "'type' next to 'anyOf'"),
    ({"allOf": [{}, {}]}, "'allOf' with several parts"),
    ({"minLength": 3}, "'minLength' without 'type'"),
    ({"type": "string", "pattern": "^[a-z]+-[a-z]+$", "maxLength": 999}, "'maxLength' next to 'pattern'"),
    ({"type": "string", "format": "uuid", "minLength": 3}, "'maxLength' next to 'format'"),
    ({"type": "string", "pattern": '^"a"$'}, "quotes"),
    ({"type": "string", "pattern": "^(?:(?!a).)*b"}, "lookahead '(?!'"),
    ({"type": "string", "pattern": 3}, "'pattern' must be a string"),
    ({"type": "integer", "enum": ["a"]}, "no value of 'enum'"),
    ({"$ref": "http://a/b"}, "names no part"),
    ({"$ref": "#a"}, "names no part"),
    ({"$ref": "#/a"}, "names no part"),
    ({"$ref": 3}, "names no part"),
    ({"type": "string", "maxLength": "3}|x{1"}, "'maxLength' must be"),
    ({"type": "string", "minLength": -1}, "'minLength' must be"),
    ({"type": "object", "properties": [1]}, "'properties' must be an object"),
    ({"type": "object", "properties": {"a": 3}}, "must be an object or a boolean"),
    ({"type": "object", "required": 3}, "'required' must be an array"),
    ({"type": "object", "required": [3]}, "'required' must be an array"),
    ({"allOf": 3}, "'allOf' must be an array"),
    ({"type": 3, "enum": [1]}, "'type' must be"),
    ({"type": "any"}, "'type' is 'any'"),
    ({"type": "array", "items": [{}]}, "'prefixItems'"),
    ({"type": "integer", "exclusiveMinimum": True}, "'exclusiveMinimum' must be a number"),
    ({"type": "integer", "minimum": 2**70}, "64 bits"),
    ({"enum": [2**70]}, "64 bits"),
    ({"type": "number", "minimum": 1e30}, "2**53"),
    (
        {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": True},
        "next to 'patternProperties'",
    ),
    ({"type": "object", "patternProperties": {"a": {}, "b": {"type": "null"}}}, "that one name may fit"),
    ({"type": "object", "patternProperties": {f"^{i}$": {"const": i} for i in range(30)}}, "so many"),
    ({"type": "object", "properties": {"ab": {"type": "null"}}, "patternProperties": {"a": {}}}, "'ab' fits"),
    ({"type": "object", "propertyNames": {"anyOf": [{}]}}, "'anyOf' in 'propertyNames'"),
    ({"type": "object", "properties": {"a": False}, "additionalProperties": True}, "excluded property 'a'"),
]
IMPOSSIBLE: list[tuple[Any, str]] = [
    ({"anyOf": []}, "empty 'anyOf'"),
    ({"anyOf": [False]}, "empty 'anyOf'"),
    ({"enum": []}, "empty 'enum'"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "'minItems' 3 is greater than 'maxItems' 2"),
    ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "there can be 1 items"),
    ({"type": "array", "prefixItems": [{}, False], "minItems": 2}, "there can be 1 items"),
    ({"type": "string", "pattern": "^[^\\s\\S]$"}, "no string matches"),
    ({"type": "object", "patternProperties": {"^x": False}, "required": ["x1"]}, "'x1' is not allowed"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "'minLength' 3 is greater than 'maxLength' 2"),
    ({"type": "number", "minimum": 3, "maximum": 2}, "lower bound"),
    ({"type": "number", "minimum": 3, "exclusiveMaximum": 3}, "lower bound"),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "no integer between"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "'a' is not allowed"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' is not allowed"),
    ({"type": "object", "required": ["b"], "propertyNames": {"pattern": "^a"}}, "'b' is not allowed"),
    ({"type": "object", "minProperties": 2, "maxProperties": 1}, "'minProperties' 2 is greater"),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 2}, "1 are declared"),
    ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, "2 properties are required"),
]


@pytest.mark.parametrize(("schema", "names"), REFUSED + IMPOSSIBLE, ids=lambda value: str(value)[:60])
def test_refusals_say_what_and_where(schema: Any, names: str) -> None:
    for outer, path in (
        (schema, "#"),
        ({"type": "object", "properties": {"x/y": schema}}, "#/properties/x~1y"),
        ({"anyOf": [{"items": schema}]}, "#/anyOf/0/items"),
        ({"prefixItems": [{}, {"additionalProperties": schema}]}, "#/prefixItems/1/additionalProperties"),
    ):
        with pytest.raises(SchemaError, match=re.escape(names)) as caught:
            prepared(outer)
        assert caught.value.path.startswith(path)


def _node(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


SELF = {"$ref": "#"}
A = {"$ref": "#/$defs/A"}
ENDLESS: list[tuple[dict[str, Any], str]] = [
    (A | {"$defs": {"A": A}}, "#/$defs/A"),
    (_node(a={"$ref": "#/properties/a"}), "#/properties/a"),
    ({"anyOf": [SELF, {"type": "null"}]}, "#"),
    (_node(next=SELF), "#"),
    ({"type": "array", "items": SELF, "minItems": 1}, "#"),
    ({"type": "array", "prefixItems": [{}, SELF], "minItems": 2}, "#"),
    ({"type": "object", "properties": {"a": SELF}, "minProperties": 1}, "#"),
    (_node(x=A) | {"$defs": {"A": _node(b={"$ref": "#/$defs/B"}), "B": {"anyOf": [_node(a=A)]}}}, "#/$defs/"),
]


@pytest.mark.parametrize(("schema", "path"), ENDLESS, ids=lambda value: str(value)[:60])
def test_schemas_that_need_themselves_are_refused(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(SchemaError, match="progress|each would need another") as caught:
        prepared(schema)
    assert caught.value.path.startswith(path)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (_node(next={"anyOf": [SELF, {"type": "null"}]}), '{"next": {"next": null}}'),
        ({"type": "object", "properties": {"next": SELF}}, '{"next": {"next": {}}}'),
        ({"type": "array", "items": SELF}, "[[], [[]]]"),
        (
            _node(a={"type": ["object", "null"], **_node(a={"$ref": "#/properties/a"}), "title": "x"})
            | {"properties": {"a": _node(a={"$ref": "#/properties/a"}) | {"type": ["object", "null"]}}},
            '{"a": {"a": null}}',
        ),
    ],
)
def test_schemas_that_may_need_themselves_are_honoured(schema: dict[str, Any], text: str) -> None:
    assert accepts(compile_bytes("json_schema", json.dumps(schema)), text)


def test_a_required_property_may_be_undeclared() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}
    grammar = compile_bytes("json_schema", json.dumps({"type": "array", "items": schema}))
    assert accepts(grammar, '[{"a": 1, "b": [2]}]') and not accepts(grammar, '[{"a": 1}]')


def test_a_long_chain_of_references_is_read() -> None:
    count = 3000
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(count)} | {str(count): {"type": "null"}}
    assert len(prepared({"$ref": "#/$defs/0", "$defs": chain})["$defs"]) == count + 1


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(800):
        schema = {"items": schema}
    with pytest.raises(SchemaError, match="too deeply"):
        prepared(schema)


@pytest.mark.parametrize("value", [[1], 3, "x", None])
def test_a_schema_is_an_object(value: Any) -> None:
    with pytest.raises(SchemaError, match="object or a boolean"):
        prepared(value)


@pytest.mark.parametrize("text", ["[1", "NaN", '{"minimum": Infinity}'])
def test_a_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="not valid JSON"):
        loaded(text)


def test_annotations_and_neutral_values_are_taken() -> None:
    notes = {"title": "T", "default": 3, "examples": [1], "$schema": "x", "discriminator": {}}
    assert prepared({"type": "integer", **notes}) == {"type": "integer"}
    assert prepared({"type": "array", "uniqueItems": False, "items": True})["items"] == {}
    assert prepared({"type": "null", "$defs": {"unused": {"not": {}}}}) == {"type": "null"}


ACCEPTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"type": "string", "pattern": "a", "minLength": 2, "maxLength": 3},
        ['"ab"', '"bca"'],
        ['"a"', '"bcda"', '"bb"'],
    ),
    ({"type": "array"}, ["[]", '[1, "a"]'], ["{}"]),
    ({"type": "array", "maxItems": 2}, ["[]", '[1, {"a": 1}]'], ["[1, 2, 3]"]),
    ({"type": "array", "minItems": 1}, ["[1]", '["a", 2, 3]'], ["[]"]),
    ({"type": "array", "prefixItems": [{"type": "null"}]}, ["[]", "[null]", "[null, 1]"], ["[1]"]),
    ({"type": "array", "prefixItems": [{}, {}], "maxItems": 1}, ["[]", "[1]"], ["[1, 2]"]),
    ({"type": "object"}, ["{}", '{"a": [1]}'], ["[]"]),
    ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
    ({"type": "object", "required": ["a"]}, ['{"a": 1}'], ["{}"]),
    (
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}},
        ["{}", '{"x_1": 1}'],
        ['{"y": 1}'],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}},
            "additionalProperties": {"type": "integer"},
        },
        ['{"a": null, "b": 1}', '{"b": 1}'],
        ['{"a": 1}'],
    ),
    (
        {"type": "object", "properties": {'"': {"type": "null"}}, "additionalProperties": True},
        ['{"\\"": null}'],
        ['{"\\"": 1}'],
    ),
    (
        {"type": "object", "patternProperties": {"^x": {"type": "null"}, "^y": {"type": "integer"}}},
        ['{"x1": null, "y": 3}', "{}"],
        ['{"x1": 3}', '{"y": null}', '{"z": 1}'],
    ),
    (
        {"type": "object", "properties": {"x": {}, "y": {}}, "patternProperties": {"^x": False}},
        ['{"y": 1}'],
        ['{"x": 1}'],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "B": {}},
            "propertyNames": {"pattern": "^[a-z]+$"},
            "additionalProperties": {"type": "integer"},
        },
        ['{"a": null, "ab": 1}', "{}"],
        ['{"a": 1}', '{"B": 1}', '{"C": 1}'],
    ),
    ({"enum": [0.1, 1e-7, [1], {"a": 0.3}]}, ["0.1", "[ 1 ]", '{ "a": 0.3}'], ["0.10000000000000001", "[]"]),
    ({"type": ["string", "null"], "enum": ["a", 1, None]}, ['"a"', "null"], ["1"]),
    ({"type": "number", "const": 1}, ["1"], ["2"]),
    ({"type": "integer", "minimum": 1.5, "exclusiveMaximum": 4}, ["2", "3"], ["1", "4"]),
    ({"type": "number", "minimum": 0.123456789}, ["0.123457", "1"], ["0.123456"]),
    ({"type": "string", "format": "uuid", "pattern": "^a"}, ['"abc"'], ['"b"']),
    (
        {"allOf": [{"$ref": "#/$defs/a~1b/anyOf/1"}], "$defs": {"a/b": {"anyOf": [{}, {"type": "null"}]}}},
        ["null"],
        ["1"],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "others"), ACCEPTED, ids=lambda value: str(value)[:60])
def test_what_a_schema_accepts(schema: dict[str, Any], valid: list[str], others: list[str]) -> None:
    grammar = compile_bytes("json_schema", json.dumps(schema))
    for text in valid + others:
        assert accepts(grammar, text) == (text in valid), text
