"""What an endpoint adds to generation: it reads a body, and names the renderer of the response."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from frontend.api.generation.caller import Caller
from frontend.api.generation.generate_request import GenerateRequest
from frontend.api.generation.prompts import Prompt
from frontend.api.generation.renderer import Renderer
from frontend.api.schemas.generation import GenerationRequest

__all__ = ["Endpoint", "ParsedRequest"]


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A request body in the form that all endpoints share."""

    fields: GenerationRequest
    prompts: Callable[[], list[Prompt]]
    """Tokenizes the prompts; may append to `warnings`. Raises RequestError."""
    renderer: Callable[[GenerateRequest], Renderer]
    default_max_tokens: int
    """max_tokens if the request does not set it."""
    earlier_bytes: int = 0
    """Size of what the prompts are made of besides the body."""
    warnings: list[str] = field(default_factory=list)
    logprobs: int | None = None
    """Number of top tokens per generated token; None: no log probabilities."""
    echo_logprobs: bool = False
    """Whether tokens of an echoed prompt have log probabilities, too."""
    shows_prompt_once: bool = False
    """Whether a response in one piece shows the ids of the prompt once, and not with each choice."""
    score_only: bool = False
    """Whether only prompt logprobs are wanted: `echo` with max_tokens 0."""
    reasoning: bool = True
    """Whether reasoning is part of the response."""


class Endpoint(Protocol):
    """Reads the bodies of one route."""

    id_prefix: ClassVar[str]
    operation: ClassVar[str]
    """The name of `gen_ai.operation.name` in traces: chat or text_completion."""
    field_names: ClassVar[Mapping[str, str]]
    """The names of fields of ParsedRequest that have others in the body."""

    def read(self, body: bytes, caller: Caller) -> ParsedRequest:
        """Decode and check a body; runs in any thread. Raises RequestError."""
