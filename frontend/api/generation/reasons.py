"""Why a sequence ended."""

__all__ = ["INCOMPLETE", "openai_reason"]

INCOMPLETE = frozenset({"max_tokens", "aborted", "timeout"})
"""Raw reasons of sequences that the model did not end."""


def openai_reason(raw: str, called: bool = False) -> str:
    """`stop`, `length`, or `tool_calls` for a complete reply with such calls, for an update's raw reason."""
    if raw in INCOMPLETE:
        return "length"
    return "tool_calls" if called else "stop"
