"""Renders what was generated in the form of one endpoint."""

from typing import Protocol

import msgspec

from frontend.api.schemas.generation import Usage
from frontend.errors import ApiError
from frontend.text.output_processor import SequenceOutput

__all__ = ["Renderer"]


class Renderer(Protocol):
    """Renders one response, complete or as server-sent events.

    Its methods run in any thread, one at a time. `index` is the number of a sequence, from 0. `usage` is
    None unless the request asks for `continuous_usage_stats`.
    """

    def response(self, results: list[SequenceOutput], usage: Usage) -> msgspec.Struct | msgspec.Raw:
        """The complete response; `results` has one update for each sequence."""

    def start(self) -> bytes:
        """The events before anything is generated."""

    def begin(self, index: int, update: SequenceOutput, usage: Usage | None) -> bytes:
        """The events before the first text of a sequence; `update` is its first."""

    def delta(self, index: int, update: SequenceOutput, usage: Usage | None) -> bytes:
        """The events of one update."""

    def end(self, usage: Usage) -> bytes:
        """The last events."""

    def error(self, error: ApiError) -> bytes:
        """The last events if the generation fails."""
