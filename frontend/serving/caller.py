"""Who sent a request, as far as serving it depends on that."""

from dataclasses import dataclass

__all__ = ["Caller"]


@dataclass(frozen=True)
class Caller:
    """What the HTTP layer knows beside the body."""

    tenant: str = ""
    """Stands for the API key that was used; callers of different keys share no cached prompts."""
    request_id: str | None = None
    """The client's own name for this request, from its X-Request-Id header."""
