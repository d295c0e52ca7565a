"""Structural tags: their schemas and expressions are prepared, and those of lenient tools replaced."""

from typing import Any

import pytest

from workers.grammar.schema_parts import SchemaError
from workers.grammar.structural_tags import ANY_OBJECT, MAX_WHITESPACE, prepared_tag


def _tag(*schemas: Any, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "json_schema", "json_schema": schema, **fields} for schema in schemas]
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}


def _schemas(tag: Any) -> list[Any]:
    return [part["json_schema"] for part in tag["format"]["elements"]]


def test_schemas_are_prepared_and_their_white_space_is_bounded() -> None:
    (part,) = prepared_tag(_tag({"type": "array"})).tag["format"]["elements"]
    assert part["json_schema"] == {"type": "array", "items": {}}
    assert part["max_whitespace_cnt"] == MAX_WHITESPACE


def test_a_schema_that_cannot_be_enforced_is_refused() -> None:
    with pytest.raises(SchemaError, match="'not'.*at #/items"):
        prepared_tag(_tag({"items": {"not": {}}}))


def test_a_lenient_tool_gets_any_object() -> None:
    tag = _tag({"not": {}}, {"not": {}}, tool="go", lenient=True)
    found = prepared_tag(tag, of_tools=True)
    assert _schemas(found.tag) == [ANY_OBJECT, ANY_OBJECT]
    (warning,) = found.warnings
    assert "'go'" in warning and "'not'" in warning


def test_an_error_names_the_tool_and_the_place() -> None:
    tag = _tag({"type": "object", "properties": {"a": {"not": {}}}}, tool="go", lenient=False)
    with pytest.raises(SchemaError, match="the tool 'go'.*'not'.*at #/properties/a"):
        prepared_tag(tag, of_tools=True)


def test_a_client_cannot_make_a_tag_lenient() -> None:
    with pytest.raises(SchemaError):
        prepared_tag(_tag({"not": {}}, tool="go", lenient=True))


def test_lenient_schemas_that_fail_later_are_replaced() -> None:
    found = prepared_tag(_tag({"type": "null"}, {"type": "boolean"}, tool="go", lenient=True), of_tools=True)

    def check(schema: Any) -> None:
        if schema["type"] == "boolean":
            raise RuntimeError("too odd")

    assert found.relax(check)
    assert _schemas(found.tag) == [{"type": "null"}, ANY_OBJECT]
    assert "too odd" in found.warnings[0]
    assert not found.relax(check)


def test_expressions_are_prepared() -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "\\Aa.\\Z"}}
    assert "\\A" not in prepared_tag(tag).tag["format"]["pattern"]
    with pytest.raises(SchemaError, match="lookbehind"):
        prepared_tag({"type": "regex", "pattern": "(?<=a)b"})


def test_free_text_has_no_special_tokens() -> None:
    assert prepared_tag({"type": "any_text"}).tag["excludes"]
    assert prepared_tag(_tag({}, style="qwen_xml")).tag["format"]["elements"][0]["excludes"]
