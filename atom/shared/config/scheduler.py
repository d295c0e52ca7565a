"""Limits and order of a step."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens computed in one step. If unset: 16384 on a GPU, 2048 on a CPU."""
    max_num_mixed_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens of a step in which sequences generate, so that none waits long; at most
    --max-num-batched-tokens, which is no limit. If unset: on a GPU 2048, with at most 2 GiB of weights 4096,
    on a CPU 512, and at least twice the tokens of all sequences that may generate; LLMEngine: no limit."""
    long_prefill_token_threshold: Annotated[int, Meta(ge=0)] = 0
    """Most tokens of one prompt computed in a step, so that it does not delay short ones; 0: no limit."""
    max_num_seqs: Annotated[int, Meta(ge=1)] | None = None
    """Most sequences running at once. If unset: 512 on a GPU, 256 on a CPU."""
    max_queue_time: Annotated[float, Meta(gt=0)] | None = None
    """Most seconds that a request waits until it runs: one that would wait longer, at the rate at which
    requests end now, is refused with 429, and so is one that has. If unset, --max-queued-requests alone
    limits the queue."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """fcfs runs requests in order of arrival, priority runs the smallest `priority` first."""
    fair_share: bool = False
    """API keys take turns by tokens: those of one key do not delay those of others, however many they are."""
    scheduler_delay_factor: Annotated[float, Meta(ge=0)] = 0.0
    """While requests are running, delay new prompts by this multiple of the last prefill step's time."""
