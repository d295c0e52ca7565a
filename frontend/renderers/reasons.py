"""OpenAI's finish reasons."""

__all__ = ["openai_reason"]

# An aborted sequence is incomplete, as with max_tokens; "stop" would mean complete.
_LENGTH = frozenset({"max_tokens", "aborted"})


def openai_reason(raw: str, called: bool = False) -> str:
    """`stop`, `length`, or `tool_calls` for a complete reply with such calls, for an update's raw reason."""
    if raw in _LENGTH:
        return "length"
    return "tool_calls" if called else "stop"
