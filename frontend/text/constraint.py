"""What the output of a request must be."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from atom.shared.messages.codec import encode
from atom.shared.messages.grammar import GrammarSource
from atom.shared.sampling_params import StructuredOutputsParams

__all__ = ["Constraint", "constraint_of"]

MAX_CHARACTERS = 1 << 19
_KEY_BYTES = 16


@dataclass(frozen=True)
class Constraint:
    """A grammar that is not compiled yet."""

    source: GrammarSource
    field: str
    """The field of the request that asks for it, for error messages."""

    @cached_property
    def key(self) -> bytes:
        """The same for the same source."""
        return hashlib.sha256(encode(self.source)).digest()[:_KEY_BYTES]


def constraint_of(params: StructuredOutputsParams, field: str = "structured_outputs") -> Constraint:
    """The constraint of a request that sets `field`. Raises ValueError for a text that is too long."""
    source = _source(params)
    if len(source.text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(source.text)} characters, at most {MAX_CHARACTERS} are allowed")
    return Constraint(source, field)


def _source(params: StructuredOutputsParams) -> GrammarSource:
    any_whitespace = not params.disable_any_whitespace
    if params.json is not None:
        return GrammarSource("json_schema", _text(params.json), any_whitespace)
    if params.json_object:
        return GrammarSource("json_object", "", any_whitespace)
    if params.regex is not None:
        return GrammarSource("regex", params.regex)
    if params.grammar is not None:
        return GrammarSource("grammar", params.grammar)
    if params.choice is not None:
        texts = [{"type": "const_string", "value": text} for text in params.choice]
        return GrammarSource("structural_tag", _text(_tag({"type": "or", "elements": texts})))
    assert params.structural_tag is not None, "one of the fields is set"
    return GrammarSource("structural_tag", _text(params.structural_tag))


def _tag(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": content}


def _text(value: str | dict[str, Any] | bool) -> str:
    try:
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
