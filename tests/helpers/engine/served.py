"""A tiny model in the real engine, with its processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from atom import LLMEngine, SamplingParams
from atom.shared.messages.engine import CoreStats
from atom.shared.messages.worker import SlidingWindowSpec
from atom.shared.sampling_params import MAX_LOGPROBS
from engine_core.kv_cache.kv_plan import peak_blocks
from tests.helpers.checkpoints.reference import MAX_TOKENS, NEW_TOKENS, TOLERANCE, Reference

CHUNK = 16
TIGHT_BLOCK = 4


@dataclass(frozen=True)
class Setting:
    """Options of the engine."""

    tp: int
    tight: bool
    """Steps of `CHUNK` tokens, and no more KV blocks than the longest request needs."""
    device: str = "cpu"
    dcp: int = 1

    @property
    def name(self) -> str:
        return f"{'tight' if self.tight else 'roomy'}-tp{self.tp}"

    def options(self, windows: list[int | None]) -> dict[str, Any]:
        """For `LLMEngine`."""
        common: dict[str, Any] = {
            "tensor_parallel_size": self.tp,
            "decode_context_parallel_size": self.dcp,
            "device": self.device,
            "dtype": "float32",
            "max_model_len": MAX_TOKENS,
            "state_checkpoint_interval_tokens": CHUNK,
        }
        if self.device == "cpu":
            common["cpu_threads"] = 1
        if not self.tight:
            return common | {"max_num_batched_tokens": 512, "max_num_seqs": 8, "num_kv_blocks": 64}
        return common | {
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 8,
            "block_size": TIGHT_BLOCK,
            "num_kv_blocks": max(map(_longest, set(windows))),
        }


def _longest(window: int | None) -> int:
    """Blocks that the longest request needs in a layer with that window."""
    if window is None:
        return -(-MAX_TOKENS // TIGHT_BLOCK)
    return peak_blocks(SlidingWindowSpec(TIGHT_BLOCK, 0, window), MAX_TOKENS, CHUNK)


@dataclass
class Served:
    """A running engine and transformers' outputs."""

    engine: LLMEngine
    reference: Reference

    def generate(self, prompts: list[list[int]], **params: Any) -> tuple[list[dict[str, Any]], "Counted"]:
        """(greedy outputs of prompts that run together, the core's counters over that time)."""
        before = self.engine.stats()
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, **{"max_tokens": NEW_TOKENS} | params)
        outputs = self.engine.generate(prompts, sampling)
        return outputs, Counted.between(before, self.engine.stats())


@dataclass(frozen=True)
class Counted:
    """Differences of the core's counters."""

    preemptions: int
    preempted_decodes: int
    """Preemptions of requests that had sampled tokens already."""
    prefix_hits: int
    chunked_prefills: int

    @classmethod
    def between(cls, before: CoreStats, after: CoreStats) -> "Counted":
        return cls(
            after.preemptions - before.preemptions,
            _decode_preemptions(after) - _decode_preemptions(before),
            after.prefix_hits - before.prefix_hits,
            after.chunked_prefills - before.chunked_prefills,
        )


def _decode_preemptions(stats: CoreStats) -> int:
    return stats.preemptions - stats.prefill_preemptions


@contextmanager
def served(reference: Reference, setting: Setting) -> Iterator[Served]:
    with LLMEngine(str(reference.directory), **setting.options(reference.windows)) as engine:
        yield Served(engine, reference)


def ids_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def worst_difference(entries: list[dict[int, float]], expected_TV: torch.Tensor) -> float:
    """Largest difference of reported log probabilities; entry t belongs to row t.

    Raises AssertionError where the reported tokens are not the most likely ones, ties aside.
    """
    assert len(entries) == len(expected_TV)
    worst = 0.0
    for entry, expected_V in zip(entries, expected_TV, strict=True):
        assert len(entry) >= MAX_LOGPROBS
        top = sorted(entry.values(), reverse=True)[:MAX_LOGPROBS]
        likely = expected_V.topk(MAX_LOGPROBS).values.tolist()
        assert all(abs(ours - theirs) <= TOLERANCE for ours, theirs in zip(top, likely, strict=True))
        worst = max(worst, *(abs(value - float(expected_V[token])) for token, value in entry.items()))
    return worst
