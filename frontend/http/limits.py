"""Size limits and deadlines of HTTP connections."""

from dataclasses import dataclass

__all__ = ["HttpLimits"]


@dataclass(frozen=True)
class HttpLimits:
    """Limits of the HTTP server, in bytes and seconds."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_body_memory: int = 256 * 1024 * 1024
    """Size of all bodies that are being received or parsed."""
    max_output_memory: int | None = None
    """Size of all output that was generated and is not sent yet; None: see `default_output_memory`."""
    max_line_bytes: int = 8190
    """Size of the request line and of each header."""
    max_headers: int = 128
    body_deadline_s: float = 60.0
    """For receiving a request's whole body."""
    handshake_deadline_s: float = 20.0
    """For the TLS handshake of a new connection."""
    head_deadline_s: float = 75.0
    """A new connection that has sent no complete request head for this long is closed."""
    keepalive_s: float = 620.0
    """An idle connection is closed after this time. Clients and proxies, up to Google's load balancers
    with 600 s, close theirs earlier, so that no request meets a connection that is just closing."""
    write_deadline_s: float = 120.0
    """A client that reads nothing of its response for this long is disconnected."""
    silence_s: float = 15.0
    """A stream without tokens for this long sends an SSE comment, so that proxies keep it open."""
    stats_deadline_s: float = 1.0
    """How long GET /metrics waits for the engine's counters."""
