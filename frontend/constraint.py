"""What the output of a request must be."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from atom.messages.codec import encode
from atom.messages.grammar import GrammarSource
from atom.sampling_params import StructuredOutputsParams

__all__ = ["Constraint", "constraint_of"]

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
    """The constraint of a request that sets `field`."""
    any_whitespace = not params.disable_any_whitespace
    if params.json is not None:
        source = GrammarSource("json_schema", _text(params.json), any_whitespace)
    elif params.json_object:
        source = GrammarSource("json_object", "", any_whitespace)
    elif params.regex is not None:
        source = GrammarSource("regex", params.regex)
    elif params.grammar is not None:
        source = GrammarSource("grammar", params.grammar)
    elif params.choice is not None:
        texts = [{"type": "const_string", "value": text} for text in params.choice]
        source = GrammarSource("structural_tag", _text(_tag({"type": "or", "elements": texts})))
    else:
        assert params.structural_tag is not None, "one of the fields is set"
        source = GrammarSource("structural_tag", _text(params.structural_tag))
    return Constraint(source, field)


def _tag(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": content}


def _text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
