"""Which requests run together."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step at most; 16384 on a GPU and 2048 on a CPU when absent."""
    max_num_seqs: int | None = None
    """Requests in progress at most; 512 on a GPU and 256 on a CPU when absent."""
    scheduling_policy: str = "fcfs"
    """fcfs (first come, first served) or priority (smaller `priority` first)."""
    scheduler_delay_factor: float = 0.0
    """Hold new prompts back for this multiple of the last prompt step's time while others run."""
