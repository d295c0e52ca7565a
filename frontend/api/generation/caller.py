"""The client of a request, as far as serving depends on it."""

import re
from dataclasses import dataclass

from frontend.metrics.tracing import TraceContext

__all__ = ["REQUEST_ID", "Caller"]

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""Request ids that clients may choose: they are copied into headers and logs."""


@dataclass(frozen=True)
class Caller:
    """Facts from the HTTP layer that are not in the body."""

    tenant: str = ""
    """Identifies the API key; different tenants share no prefix cache."""
    request_id: str | None = None
    """The X-Request-Id header, if it matches REQUEST_ID."""
    data_parallel_rank: int | None = None
    """The X-Data-Parallel-Rank header."""
    timeout_s: float | None = None
    """The X-Request-Timeout header."""
    is_resumable: bool = False
    """The X-Resumable-Stream header."""
    session: int = 0
    """Hash of the tenant and the X-Session-ID header; 0: none."""
    trace: TraceContext | None = None
    """The traceparent and tracestate headers."""

    @property
    def fields(self) -> dict[str, str | int]:
        """Those of an `AddRequest` that name the client."""
        return {"tenant": self.tenant, "session": self.session}
