"""Counters of a core since its start; `CoreStats` explains each of them."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    steps: int = 0
    preemptions: int = 0
    prefill_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    chunked_prefills: int = 0
    overlapped_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
