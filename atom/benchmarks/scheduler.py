"""Cost of the engine core for each step: schedule, take in the result, build the answers.

    python -m atom.benchmarks.scheduler --running 256 1024 --steps 2000

No model runs: the drawn ids are made up, and results come one step late, as in serving.
"""

import argparse
import json
import statistics
import time
from array import array

from atom.messages.engine import AddRequest, Sampling, pack_ids
from atom.messages.worker import BatchResult, FullAttentionSpec, ScheduledBatch
from engine_core.core import EngineCore
from engine_core.kv_cache_manager import KVCacheManager
from engine_core.scheduler import Limits

BLOCK_SIZE = 16
WARMUP_STEPS = 64
PROMPT_TOKENS = 100
EOS = 2


def steady_core(running: int, steps: int) -> EngineCore:
    """A core whose `running` requests are all in decode, at different places in their blocks."""
    max_tokens = steps + 4 * WARMUP_STEPS
    blocks = running * ((PROMPT_TOKENS + BLOCK_SIZE + max_tokens) // BLOCK_SIZE + 1)
    budget = running * (PROMPT_TOKENS + BLOCK_SIZE)  # all prompts in the first step
    kv = KVCacheManager([FullAttentionSpec(BLOCK_SIZE, 1)], [blocks], budget, seed=1)
    core = EngineCore(Limits(running, budget), kv, max_model_len=1 << 20)
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    for index in range(running):
        prompt = pack_ids([index, *range(PROMPT_TOKENS + index % BLOCK_SIZE)])
        core.add(AddRequest(index, prompt, max_tokens, greedy, [EOS]), b"frontend")
    return core


def measure(running: int, steps: int) -> list[float]:
    """Microseconds of each of `steps` steps with `running` requests in steady decode."""
    core = steady_core(running, steps)
    ids = array("i", [1000 + index for index in range(running)]).tobytes()
    pending = [_next(core)]
    for _ in range(WARMUP_STEPS):
        _turn(core, pending, ids)
    times = []
    for _ in range(steps):
        began = time.perf_counter_ns()
        _turn(core, pending, ids)
        times.append((time.perf_counter_ns() - began) / 1000)
    return times


def _turn(core: EngineCore, pending: list[ScheduledBatch], ids: bytes) -> None:
    """Hand out one step, then take in the result of the one before."""
    pending.append(_next(core))
    core.update(BatchResult(pending.pop(0).step, ids))


def _next(core: EngineCore) -> ScheduledBatch:
    batch = core.schedule()
    assert batch is not None
    return batch


def report(running: list[int], steps: int) -> list[dict[str, float]]:
    """One row for each number of running requests; `ratio` compares with the first row."""
    rows: list[dict[str, float]] = []
    for count in running:
        times = sorted(measure(count, steps))
        median = statistics.median(times)
        p99 = times[int(0.99 * (len(times) - 1))]
        base = rows[0]["median_us"] if rows else median
        rows.append({"running": count, "median_us": median, "p99_us": p99, "ratio": median / base})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="atom.benchmarks.scheduler", description="Cost of the engine core.")
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1024], help="requests in decode")
    parser.add_argument("--steps", type=int, default=2000, help="steps to time")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = report(args.running, args.steps)
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'running':>8} {'median us':>10} {'p99 us':>10} {'ratio':>6}")
    for row in rows:
        print(f"{row['running']:>8} {row['median_us']:>10.1f} {row['p99_us']:>10.1f} {row['ratio']:>6.2f}")


if __name__ == "__main__":
    main()
