"""The functions that a request offers to the model."""

from typing import Any

import msgspec

from frontend.api.schemas.fields import Schema

__all__ = ["TOOL", "Function", "Tool"]


class Function(msgspec.Struct, omit_defaults=True):
    """One function; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One entry of `tools`."""

    type: str = "function"
    function: Function


TOOL = Schema(
    Tool,
    neutral={"custom": ()},
    harmless=frozenset({"cache_control"}),
    nested={"function": Schema(Function, neutral={}, harmless=frozenset())},
    instead={"custom": "custom tools work in /v1/responses; here use a function with one text"},
)
