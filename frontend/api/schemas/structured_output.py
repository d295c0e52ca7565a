"""The fields that say what the output must be."""

from typing import Any

import msgspec

from frontend.api.schemas.fields import Schema

__all__ = ["RESPONSE_FORMAT", "STRUCTURED_OUTPUTS", "JsonSchemaFormat", "ResponseFormat", "StructuredOutputs"]


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A JSON schema with a name, as OpenAI's API has it."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """The output follows the schema in either case."""


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`: one of four types, with the fields of that type."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    """The structural tag."""
    structures: list[dict[str, Any]] | None = None
    """The structural tag in its older form, with `triggers`."""
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's `structured_outputs`."""

    json: dict[str, Any] | str | None = None
    """A schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None


_JSON_SCHEMA = Schema(JsonSchemaFormat, neutral={}, harmless=frozenset(), nested={"schema": None})
RESPONSE_FORMAT = Schema(
    ResponseFormat, neutral={}, harmless=frozenset(), nested={"json_schema": _JSON_SCHEMA, "format": None}
)
STRUCTURED_OUTPUTS = Schema(
    StructuredOutputs,
    # Undeclared properties are never written.
    neutral={"disable_fallback": (False, True), "disable_additional_properties": (False, True)},
    harmless=frozenset(),
)
