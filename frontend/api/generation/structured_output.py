"""Reads the fields of a request that say what its output must be."""

from typing import Any

import msgspec

from atom.shared.messages.grammar import GrammarSource
from atom.shared.sampling_params import StructuredOutputsParams
from frontend.api.generation.prompts import Prompt
from frontend.api.generation.tag_parts import Format, any_of, as_content, in_frame
from frontend.api.schemas.generation import GenerationRequest
from frontend.api.schemas.structured_output import ResponseFormat, StructuredOutputs
from frontend.errors import RequestError
from frontend.text.constraint import Constraint, constraint_of

__all__ = ["reply_constraint"]

_RESPONSE_FORMAT = "response_format"
_STRUCTURED_OUTPUTS = "structured_outputs"
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older fields, and their names in `structured_outputs`."""


class _StructuralTag(msgspec.Struct):
    format: Format


def reply_constraint(fields: GenerationRequest, prompt: Prompt) -> Constraint | None:
    """What the reply must be; None for any.

    Next to functions that may be called, it is either calls or the structured output. Raises RequestError
    naming the field at fault.
    """
    content = _read_constraint(fields)
    calls = prompt.constraint
    if content is None or (calls is not None and prompt.optional_calls is None):
        return calls or content  # a reply that must have calls has no other content
    if prompt.optional_calls is None and prompt.frame is None:
        return content
    reply = as_content(_as_format(content), prompt.frame)
    kind = "structural_tag"
    if prompt.optional_calls is not None:
        kind = "tool_calls"
        reply = any_of(prompt.optional_calls, reply)
    text = msgspec.json.encode({"type": "structural_tag", "format": in_frame(reply, prompt.frame)}).decode()
    return Constraint(GrammarSource(kind, text), content.field)


def _as_format(content: Constraint) -> Format:
    """The grammar as a part of a structural tag. Raises RequestError for one that cannot be a part."""
    source = content.source
    field = content.field
    if not source.any_whitespace:
        raise RequestError(
            f"'{field}': 'disable_any_whitespace' cannot be enforced together with tools, or for this model",
            param=field,
        )
    try:
        return _decoded(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"'{field}' is not valid: {error}", param=field) from None


def _decoded(source: GrammarSource) -> Format:
    match source.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": msgspec.json.decode(source.text)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": source.text}
        case "grammar":
            return {"type": "grammar", "grammar": source.text}
    return msgspec.json.decode(source.text, type=_StructuralTag).format


def _read_constraint(fields: GenerationRequest) -> Constraint | None:
    """What the text must be; None for any."""
    found = []
    if (response_format := fields.response_format) is not None:
        found += _of(_RESPONSE_FORMAT, _response_format(response_format))
    if (outputs := fields.structured_outputs) is not None:
        found += _of(_STRUCTURED_OUTPUTS, _structured_outputs(outputs))
    for field, name in _GUIDED.items():
        if (value := getattr(fields, field)) not in (None, []):
            found += _of(field, {name: value})
    if len(found) > 1:
        first = found[0].field
        second = found[1].field
        raise RequestError(f"'{first}' and '{second}' both say what the output must be: send one", second)
    return found[0] if found else None


def _of(field: str, values: dict[str, Any]) -> list[Constraint]:
    if not values:
        return []
    try:
        return [constraint_of(StructuredOutputsParams(**values), field)]
    except ValueError as error:
        raise RequestError(f"'{field}': {error}", param=field) from None


def _response_format(given: ResponseFormat) -> dict[str, Any]:
    match given.type:
        case "text":
            return {}
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            if given.json_schema is None or given.json_schema.schema is None:
                param = f"{_RESPONSE_FORMAT}.json_schema.schema"
                raise RequestError(f"'{param}' is missing", param=param)
            return {"json": given.json_schema.schema}
        case "structural_tag":
            return {"structural_tag": _structural_tag(given)}
    raise RequestError(
        f"'{_RESPONSE_FORMAT}.type' must be text, json_object, json_schema or structural_tag, "
        f"not {given.type[:40]!r}",
        param=f"{_RESPONSE_FORMAT}.type",
    )


def _structural_tag(given: ResponseFormat) -> dict[str, Any]:
    """A structural tag; the older form has a schema for each begin and end."""
    if given.format is not None:
        return {"type": "structural_tag", "format": given.format}
    if given.structures is None or given.triggers is None:
        raise RequestError(
            f"'{_RESPONSE_FORMAT}' of type structural_tag needs 'format', or 'structures' and 'triggers'",
            param=_RESPONSE_FORMAT,
        )
    tags = [
        {
            "type": "tag",
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema")},
            "end": one.get("end"),
        }
        for one in given.structures
    ]
    content = {"type": "triggered_tags", "triggers": given.triggers, "tags": tags}
    return {"type": "structural_tag", "format": content}


def _structured_outputs(given: StructuredOutputs) -> dict[str, Any]:
    return {
        name: value
        for name in given.__struct_fields__
        if (value := getattr(given, name)) is not None and value is not False
    }
