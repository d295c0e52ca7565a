"""CPU time of the engine core for a step: schedule, process the result, build the responses.

    python -m benchmarks.scheduler --running 256 1024 --steps 2000
    python -m benchmarks.scheduler --running 1024 --num-speculative-tokens 0 3
    python -m benchmarks.scheduler --worst

No model runs: the sampled ids are constant, and results come one step late, as in serving. The sizes
are measured in turn, so that other load on the machine affects all of them equally. Of draft tokens, each
number is accepted equally often. The flight recorder's time is that of the call that records a step, which
also frees the oldest recorded one, and of reading the clock. `--worst` instead times each call that the
largest legal requests need, and prints the longest one of each kind.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from tqdm import trange

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.cli import CommandLineParser
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.codec import encode
from atom.shared.messages.engine import AddRequest, LogitsProcessors, Sampling, pack_ids
from atom.shared.messages.launch import CoreLaunch
from atom.shared.messages.worker import BatchResult, FullAttentionSpec, ScheduledBatch
from benchmarks.common.arguments import add_output_flag, not_negative, positive, single_line_errors
from benchmarks.common.report import report, write
from engine_core.core import EngineCore
from engine_core.flight_recorder import FlightRecorder
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.scheduler import Limits

T = TypeVar("T")

BLOCK_SIZE = 16
PROMPT_TOKENS = 100
WARMUP_STEPS = 64
TURN_STEPS = 50
EOS = 2
VOCAB_SIZE = 1 << 18
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class SteadyDecode:
    """A core with `running` requests in decode, each at a different offset in its block."""

    def __init__(self, running: int, steps: int, num_drafts: int = 0):
        self.running = running
        self.num_drafts = num_drafts
        self.times: list[float] = []
        """Microseconds of each step."""
        self.recorder_times: list[int] = []
        """Nanoseconds in which each step was recorded."""
        self._recorder = _flight_recorder()
        width = 1 + num_drafts
        max_tokens = width * (steps + 2 * WARMUP_STEPS)
        blocks = running * ((PROMPT_TOKENS + BLOCK_SIZE + max_tokens) // BLOCK_SIZE + 1)
        budget = running * (PROMPT_TOKENS + BLOCK_SIZE)  # all prompts in the first step
        kv = KVCacheManager([FullAttentionSpec(BLOCK_SIZE, 1)], [blocks], budget, seed=1)
        self._core = EngineCore(Limits(running, budget, num_drafts=num_drafts), kv, max_model_len=1 << 20)
        for index in range(running):
            prompt = pack_ids([index, *range(PROMPT_TOKENS - 1 + index % BLOCK_SIZE)])
            self._core.add(AddRequest([index], prompt, max_tokens, GREEDY, [EOS]), b"frontend")
        self._ids = pack_ids(range(1000, 1000 + width * running))
        self._results = [self._result(offset) for offset in range(width)]
        """Results of successive steps: each request accepts 0 to `num_drafts` drafts in turn."""
        self._in_flight = self._prefill()
        """Number of the step in flight."""
        for _ in range(WARMUP_STEPS):
            self._step()

    def run(self, steps: int) -> None:
        """Time `steps` steps."""
        for _ in range(steps):
            began = time.perf_counter_ns()
            batch = self._step()
            done = time.perf_counter_ns()
            frame = encode(batch)  # as its link to the workers does
            encoded = time.perf_counter_ns()
            self._recorder.sent(frame)
            recorded = time.perf_counter_ns()
            self.times.append((done - began) / 1000)
            self.recorder_times.append(recorded - encoded)

    def _step(self) -> ScheduledBatch:
        batch = self._schedule()
        ids, counts, num_proposed = self._results[self._in_flight % len(self._results)]
        self._core.update_from_output(
            BatchResult(self._in_flight, ids, counts=counts, num_proposed=num_proposed)
        )
        self._in_flight = batch.step
        return batch

    def _result(self, offset: int) -> tuple[bytes, bytes, bytes]:
        """Ids, counts and proposals of a step."""
        if not self.num_drafts:
            return self._ids, b"", b""
        counts = [1 + (offset + index) % (1 + self.num_drafts) for index in range(self.running)]
        return self._ids[: 4 * sum(counts)], pack_ids(counts), pack_ids([self.num_drafts] * self.running)

    def _prefill(self) -> int:
        """Run steps until all requests decode; returns the number of the first decode step."""
        while True:
            batch = self._core.schedule()
            assert batch is not None
            if not batch.token_ids:
                return batch.step
            self._core.update_from_output(BatchResult(batch.step, self._ids[: 4 * len(batch.rows)]))

    def _schedule(self) -> ScheduledBatch:
        batch = self._core.schedule()
        assert batch is not None and len(batch.rows) == self.running
        return batch


def _flight_recorder() -> FlightRecorder:
    checkpoint = Checkpoint("", "LlamaForCausalLM", "llama", {}, "float32", VOCAB_SIZE, max_model_len=1 << 20)
    return FlightRecorder(CoreLaunch(EngineConfig(), checkpoint, "", "", "", hash_seed=0))


def measure(running: list[int], steps: int, num_drafts: list[int]) -> list[dict[str, float]]:
    """A row for each number of running requests and of drafts; `ratio` compares medians with the first."""
    decodes = [SteadyDecode(count, steps, drafts) for drafts in num_drafts for count in running]
    gc.collect()
    gc.freeze()  # as the engine core does
    for done in trange(0, steps, TURN_STEPS, desc="steps", leave=False, disable=None):
        for decode in decodes:
            decode.run(min(TURN_STEPS, steps - done))
    base = statistics.median(decodes[0].times)
    return [
        {
            "running": decode.running,
            "num_speculative_tokens": decode.num_drafts,
            "median_us": statistics.median(decode.times),
            "p99_us": sorted(decode.times)[int(0.99 * (steps - 1))],
            "ratio": statistics.median(decode.times) / base,
            "flight_recorder_ns": statistics.median(decode.recorder_times),
        }
        for decode in decodes
    ]


class WorstCalls:
    """The longest thread time of each call of a core; every step succeeds, and samples id 7."""

    def __init__(self, rows: int, budget: int, num_blocks: int, max_model_len: int):
        kv = KVCacheManager([FullAttentionSpec(BLOCK_SIZE, 1)], [num_blocks], budget, seed=1)
        self.core = EngineCore(Limits(rows, budget), kv, max_model_len)
        self.longest_ms: dict[str, float] = {}
        self._known: dict[int, int] = {}
        self._computed: dict[int, int] = {}

    def call(self, name: str, work: Callable[[], T]) -> T:
        """Time one call."""
        began = time.thread_time_ns()
        result = work()
        spent = (time.thread_time_ns() - began) / 1e6
        self.longest_ms[name] = max(self.longest_ms.get(name, 0.0), spent)
        return result

    def add(
        self, request_ids: list[int], prompt: bytes, max_tokens: int, sampling: Sampling = GREEDY
    ) -> None:
        """Raises ValueError for a request that the core refuses."""
        message = AddRequest(request_ids, prompt, max_tokens, sampling, [EOS])
        refusal = self.call("add", lambda: self.core.add(message, b"frontend"))
        if refusal is not None:
            raise ValueError(refusal.finished[0].message)

    def step(self) -> None:
        """One iteration of the core's loop."""
        batch = self.call("schedule", self.core.schedule)
        self.call("check_integrity_slice", self.core.check_integrity_slice)
        if batch is None:
            return
        self.call("encode", lambda: encode(batch))
        for new in batch.new_rows:
            self._known[new.row] = new.num_known
            self._computed[new.row] = new.computed
        sampled = 0
        for row, count in zip(batch.rows, batch.counts or [1] * len(batch.rows), strict=True):
            self._computed[row] += count
            sampled += self._computed[row] >= self._known[row]
        result = BatchResult(batch.step, pack_ids([7] * sampled))
        self.call("update", lambda: self.core.update_from_output(result))

    def finish(self) -> None:
        """Run steps until all requests have ended."""
        while self.core.num_live or self.core.has_deferred_work:
            self.step()

    def abort(self, request_ids: list[int]) -> None:
        """End requests, and free what they had."""
        self.call("abort", lambda: self.core.abort(request_ids))
        self.finish()


def worst_requests() -> list[dict[str, Any]]:
    """The longest call of each kind, in milliseconds, for the largest legal requests."""
    penalty = msgspec.structs.replace(GREEDY, logits_processors=LogitsProcessors(repetition_penalty=1.2))
    rows = []
    for name, count, length, sampling in (
        ("one prompt", 1, 1 << 20, GREEDY),
        ("one prompt, repetition penalty", 1, 1 << 20, penalty),
        ("128 sequences", 128, 163_840, GREEDY),
    ):
        calls = WorstCalls(1024, 65_536, 80_000, 1 << 20)
        ids = list(range(count))
        prompt = pack_ids(index % VOCAB_SIZE for index in range(length - 64))
        calls.add(ids, prompt, 64, sampling)
        while calls.core.stats().running < count:
            calls.step()
        calls.abort(ids)
        calls.add(ids, prompt, 64, sampling)  # all in the prefix cache
        calls.finish()
        rows.append({"requests": name, **calls.longest_ms})
    calls = WorstCalls(1024, 8192, 80_000, 1 << 20)
    for number in range(1024):
        calls.add([number], pack_ids(range(number, number + 2000)), 64)
    calls.finish()
    rows.append({"requests": "1024 prompts, preempted", **calls.longest_ms})
    return rows


def main() -> None:
    parser = CommandLineParser(
        prog="benchmarks.scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--running", type=positive, nargs="+", default=[256, 1024], help="requests in decode")
    parser.add_argument(
        "--num-speculative-tokens", type=not_negative, nargs="+", default=[0], help="draft tokens per request"
    )
    parser.add_argument("--steps", type=positive, default=2000, help="steps to time")
    parser.add_argument("--worst", action="store_true", help="time the calls of the largest requests instead")
    add_output_flag(parser)
    args = parser.parse_args()
    with single_line_errors():
        rows = (
            worst_requests() if args.worst else measure(args.running, args.steps, args.num_speculative_tokens)
        )
        result = report("scheduler", [], {"rows": rows})
        print(worst_text(result) if args.worst else text(result))
        write(args.output_json, result)


def text(result: dict[str, Any]) -> str:
    """The rows as text."""
    lines = [
        f"{'running':>8} {'drafts':>6} {'median us':>10} {'p99 us':>10} {'ratio':>6} {'recorder ns':>11}"
    ]
    lines += [
        f"{row['running']:>8} {row['num_speculative_tokens']:>6} {row['median_us']:>10.1f} "
        f"{row['p99_us']:>10.1f} {row['ratio']:>6.2f} {row['flight_recorder_ns']:>11.0f}"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def worst_text(result: dict[str, Any]) -> str:
    """The same of the largest requests."""
    calls = ["add", "schedule", "encode", "update", "abort", "check_integrity_slice"]
    lines = [f"{'longest call, ms':<32}" + "".join(f"{name.split('_')[0]:>10}" for name in calls)]
    lines += [
        f"{row['requests']:<32}" + "".join(f"{row.get(name, 0.0):>10.1f}" for name in calls)
        for row in result["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
