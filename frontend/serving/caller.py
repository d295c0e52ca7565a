"""Who sent a request, as far as serving it depends on that."""

import re
from dataclasses import dataclass

__all__ = ["REQUEST_ID", "Caller"]

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""What a client may call its request: it goes into headers and logs as it is."""


@dataclass(frozen=True)
class Caller:
    """What the HTTP layer knows beside the body."""

    tenant: str = ""
    """Stands for the API key that was used; callers of different keys share no cached prompts."""
    request_id: str | None = None
    """The client's own name for this request, from its X-Request-Id header; it fits REQUEST_ID."""
