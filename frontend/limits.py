"""How long and how large a conversation over HTTP may be."""

from dataclasses import dataclass

__all__ = ["HttpLimits"]


@dataclass(frozen=True)
class HttpLimits:
    """Seconds and bytes."""

    max_body_bytes: int = 32 * 1024 * 1024
    max_line_bytes: int = 8190
    """Of the request line, and of each header."""
    max_headers: int = 128
    body_deadline_s: float = 60.0
    """Until a request's body has arrived."""
    idle_deadline_s: float = 75.0
    """A connection without a complete request head for this long is closed."""
    write_deadline_s: float = 120.0
    """A client that reads nothing for this long is gone for our purposes."""
    silence_s: float = 15.0
    """A stream that has nothing to say sends a comment, so that proxies keep it open."""
    stats_deadline_s: float = 1.0
    """How long a scrape of the metrics waits for the engine's part."""
