"""OpenAI's finish reasons."""

__all__ = ["openai_reason"]

# An aborted sequence is incomplete, as with max_tokens; "stop" would mean complete.
_LENGTH = frozenset({"max_tokens", "aborted"})


def openai_reason(raw: str) -> str:
    """`stop` or `length` for an update's raw reason."""
    return "length" if raw in _LENGTH else "stop"
