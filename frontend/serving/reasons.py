"""Why a choice ended, in OpenAI's words."""

__all__ = ["openai_reason"]

# An aborted choice is cut short, as by max_tokens; "stop" would call it complete.
_LENGTH = frozenset({"max_tokens", "aborted"})


def openai_reason(raw: str) -> str:
    """`stop` or `length` for the raw reason of an update."""
    return "length" if raw in _LENGTH else "stop"
