"""GET /v1/models."""

from typing import Literal

import msgspec

__all__ = ["ModelCard", "ModelList", "ToolForm"]

ToolForm = Literal["template", "generic"]
"""Who tells the model of tools: its chat template, or a system message in a generic format."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model: an object of OpenAI's API, and of Anthropic's (`type`, `display_name` …)."""

    id: str
    object: Literal["model"] = "model"
    created: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    """`created` as a date of RFC 3339."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int
    max_model_len: int
    owned_by: Literal["atom"] = "atom"
    root: str
    """The first of the model's names, which an adapter would have as its `parent`."""
    parent: None = None
    tools: ToolForm | None = None
    """Null: tools are refused."""
    forced_acceptance_length: float | msgspec.UnsetType = msgspec.UNSET
    """Only on a server for benchmarks, whose drafts are not verified: mean tokens of a step."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str
    models: list[dict[str, str]] = []
    """Codex looks here for descriptions of OpenAI's own models: there are none."""
