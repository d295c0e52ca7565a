"""What a caller of the library gets back."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestOutput:
    """What is new about one request; given to stream callbacks."""

    request_id: int
    output_tokens: list[int] = field(default_factory=list)
    """The ids that are new since the last callback."""
    text: str = ""
    """The text that is new since the last callback."""
    finished: bool = False
    finish_reason: str | None = None
    """Raw: eos, stop_<id>, stop_sequence, max_tokens, aborted or error."""
    num_cached_tokens: int = 0
