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
    api_key: Annotated[str, Meta(min_length=1)] | None = None
    """Key that clients must send, or several with commas between; ATOM_API_KEY keeps it out of `ps`."""
    max_queued_requests: Annotated[int, Meta(ge=0)] = 1024
    """Requests that may wait beyond the running ones; more are answered 429 with Retry-After."""
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    """File with a Jinja chat template, instead of the checkpoint's."""
    shutdown_timeout: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
