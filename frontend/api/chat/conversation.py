"""A conversation with its tools, in the form that all chat endpoints share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frontend.api.chat.messages import Turn
from frontend.api.schemas.tools import Function

__all__ = ["Conversation"]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a model is told."""

    turns: Sequence[Turn]
    functions: Sequence[Function] = ()
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """In the form of chat completions."""
    parallel: bool = True
    """False: only the first tool call of a reply is returned."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    """`reasoning_effort`."""
    option_fields: Mapping[str, str] | None = None
    """Names of the body's fields that the two settings before come from, if they differ. A setting that the
    template does not read is then left out with a warning: such clients send it to every model."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    raw_text: bool = False
    """Special tokens are wanted in the text: without tools, nothing is parsed."""
