"""Which requests run together."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens computed in one step at most; 16384 on a GPU and 2048 on a CPU when absent."""
    max_num_seqs: Annotated[int, Meta(ge=1)] | None = None
    """Requests in progress at most; 512 on a GPU and 256 on a CPU when absent."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """First come, first served, or the smallest `priority` first."""
    scheduler_delay_factor: Annotated[float, Meta(ge=0)] = 0.0
    """Hold new prompts back for this multiple of the last prompt step's time while others run."""
