"""Time of the engine core per step: schedule, process the result, build the messages.

    python -m atom.benchmarks.scheduler --running 256 1024 --steps 2000
    python -m atom.benchmarks.scheduler --worst

No model runs: the sampled ids are made up, and results come one step late, as in serving. The
sizes alternate, so that other load on the machine affects all of them alike. `--worst` times instead
each call that the largest legal requests need, and prints the longest one of each kind.
"""

import argparse
import gc
import statistics
import time
from array import array
from typing import Any

from tqdm import trange

from atom.benchmarks.arguments import add_output_flag, positive, single_line_errors
from atom.benchmarks.report import report, write
from atom.config.cli import CommandLineParser
from atom.messages.engine import AddRequest, Sampling, pack_ids
from atom.messages.worker import BatchResult, FullAttentionSpec
from engine_core.core import EngineCore
from engine_core.kv_cache_manager import KVCacheManager
from engine_core.scheduler import Limits

BLOCK_SIZE = 16
PROMPT_TOKENS = 100
WARMUP_STEPS = 64
TURN_STEPS = 50
EOS = 2
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class SteadyDecode:
    """A core whose `running` requests all decode, each at another place in its block."""

    def __init__(self, running: int, steps: int):
        self.running = running
        self.times: list[float] = []
        """Microseconds of each step."""
        max_tokens = steps + 2 * WARMUP_STEPS
        blocks = running * ((PROMPT_TOKENS + BLOCK_SIZE + max_tokens) // BLOCK_SIZE + 1)
        budget = running * (PROMPT_TOKENS + BLOCK_SIZE)  # all prompts in the first step
        kv = KVCacheManager([FullAttentionSpec(BLOCK_SIZE, 1)], [blocks], budget, seed=1)
        self._core = EngineCore(Limits(running, budget), kv, max_model_len=1 << 20)
        for index in range(running):
            prompt = pack_ids([index, *range(PROMPT_TOKENS - 1 + index % BLOCK_SIZE)])
            self._core.add(AddRequest([index], prompt, max_tokens, GREEDY, [EOS]), b"frontend")
        self._ids = array("i", range(1000, 1000 + running)).tobytes()
        self._in_flight = self._prefill()
        for _ in range(WARMUP_STEPS):
            self._step()

    def run(self, steps: int) -> None:
        """Time `steps` steps."""
        for _ in range(steps):
            began = time.perf_counter_ns()
            self._step()
            self.times.append((time.perf_counter_ns() - began) / 1000)

    def _step(self) -> None:
        following = self._schedule()
        self._core.update(BatchResult(self._in_flight, self._ids))
        self._in_flight = following

    def _prefill(self) -> int:
        """Run steps until all requests decode; returns the number of the step in flight."""
        sampled = 0
        while sampled < self.running:
            batch = self._core.schedule()
            assert batch is not None
            sampled = len(batch.rows)  # each prompt is computed in one step
            if sampled < self.running:
                self._core.update(BatchResult(batch.step, self._ids[: 4 * sampled]))
        return batch.step

    def _schedule(self) -> int:
        batch = self._core.schedule()
        assert batch is not None and len(batch.rows) == self.running
        return batch.step


def measure(running: list[int], steps: int) -> list[dict[str, float]]:
    """One row for each number of running requests; `ratio` compares its median with the first row's."""
    decodes = [SteadyDecode(count, steps) for count in running]
    gc.collect()
    gc.freeze()  # as the engine core does
    for done in trange(0, steps, TURN_STEPS, desc="steps", leave=False, disable=None):
        for decode in decodes:
            decode.run(min(TURN_STEPS, steps - done))
    base = statistics.median(decodes[0].times)
    return [
        {
            "running": decode.running,
            "median_us": statistics.median(decode.times),
            "p99_us": sorted(decode.times)[int(0.99 * (steps - 1))],
            "ratio": statistics.median(decode.times) / base,
        }
        for decode in decodes
    ]


def main() -> None:
    parser = CommandLineParser(
        prog="atom.benchmarks.scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--running", type=positive, nargs="+", default=[256, 1024], help="requests in decode")
    parser.add_argument("--steps", type=positive, default=2000, help="steps to time")
    add_output_flag(parser)
    args = parser.parse_args()
    with single_line_errors():
        result = report("scheduler", [], {"rows": measure(args.running, args.steps)})
        print(text(result))
        write(args.output_json, result)


def text(result: dict[str, Any]) -> str:
    """The rows for people."""
    lines = [f"{'running':>8} {'median us':>10} {'p99 us':>10} {'ratio':>6}"]
    lines += [
        f"{row['running']:>8} {row['median_us']:>10.1f} {row['p99_us']:>10.1f} {row['ratio']:>6.2f}"
        for row in result["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
