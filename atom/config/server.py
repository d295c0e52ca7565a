"""The HTTP side."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerConfig:
    host: str = "0.0.0.0"
    """Address to listen on."""
    server_port: int = 8000
    """HTTP port."""
    default_max_tokens: int | None = None
    """max_tokens of requests that name none; chat min(8192, what fits) and completions 256 when absent."""
    lenient_fields: bool = False
    """Answer unsupported request fields with a `warnings` list instead of refusing the request."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
