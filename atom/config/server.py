"""The HTTP side."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True)
class ServerConfig:
    host: Annotated[str, Meta(min_length=1)] = "0.0.0.0"
    """Address to listen on."""
    server_port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """HTTP port; 0 takes a free one, which the start-up banner shows."""
    default_max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """max_tokens of requests that name none; chat min(8192, what fits) and completions 256 when absent."""
    lenient_fields: bool = False
    """Answer unsupported request fields with a `warnings` list instead of refusing the request."""
    shutdown_timeout: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
