"""Compares the simulation with a real run: the same requests, the same limits, a small model on this machine.

    python -m benchmarks.simulation_check --model PATH --device cpu

1. Batches of several shapes are timed. The simulation tells how many steps, tokens and attended positions
   each of them has; a least-squares fit gives the seconds of each.
2. Requests of other lengths arrive at random, at a share of the rate that the fit predicts as possible.
3. The simulation gets the same requests at the times at which the engine got them. The difference of its
   throughput and latencies from the real ones is its error.

Other work on the machine between 1 and 2 is error, too: --repeat fits and compares several times.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atom import LLMEngine
from atom.shared.config.cli import CommandLineParser
from atom.shared.messages.engine import unpack_ids
from atom.shared.outputs import Sequence as Generated
from benchmarks.common.arguments import add_output_flag, not_negative, positive, single_line_errors
from benchmarks.common.offline import benchmark_parser, fixed_length, random_prompts, running_engine, timed
from benchmarks.common.report import report, write
from benchmarks.simulation.engines import EngineSettings
from benchmarks.simulation.requests import SimulatedRequest, Workload, requests
from benchmarks.simulation.roofline import Work
from benchmarks.simulation.simulate import Outcome, Simulation

__all__ = ["compare"]

# (requests, prompt, output) of the timed batches.
_BATCHES = ((1, 32, 24), (1, 256, 2), (2, 512, 2), (4, 64, 24), (8, 32, 24), (16, 64, 16), (8, 384, 8))
_LOAD = 0.7
_FIGURES = ("output_tokens_per_second", "ttft_mean", "ttft_p50", "ttft_p90", "tpot_mean")


class Linear:
    """A cost that is linear in what a step has; also counts it."""

    def __init__(self, seconds: Sequence[float] | NDArray[np.float64] = (1.0, 0.0, 0.0)):
        """Seconds of a step, of a token, and of a pair of a token and a position that it sees."""
        self.counts = np.zeros(3)
        self._seconds = np.array(seconds)

    def __call__(self, work: Work, all_tokens: float) -> float:
        counts = np.array([1.0, work.tokens, work.context + work.chunk_pairs])
        self.counts += counts
        return float(counts @ self._seconds)


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    with single_line_errors():
        with running_engine(parser, args) as engine:
            rounds = [compare(engine, args.num_prompts, args.seed + number) for number in range(args.repeat)]
        result = report("simulation_check", [], {"rounds": rounds})
        for one in rounds:
            print(text(one))
        write(args.output_json, result)


def _parser() -> CommandLineParser:
    parser, group = benchmark_parser("simulation_check", __doc__)
    add = group.add_argument
    add("--num-prompts", type=positive, default=60, help="requests of the real run")
    add("--repeat", type=positive, default=3, help="how often to fit and compare")
    add("--seed", type=not_negative, default=0, help="seed of the requests")
    add_output_flag(group)
    return parser


def compare(engine: LLMEngine, count: int, seed: int) -> dict[str, Any]:
    """Fit, run and simulate once; times in seconds."""
    settings = settings_of(engine)
    seconds = fit(engine, settings, seed)
    shape = Workload(count, input_len=384, output_len=32, range_ratio=0.1, seed=seed + 1)
    possible = Simulation(settings, Linear(seconds)).run(requests(shape), count).requests_per_second
    rate = _LOAD * possible
    vocab = engine.checkpoint.vocab_size
    wanted = list(requests(Workload(count, rate, 384, 32, 0.1, vocab=vocab, seed=seed + 1)))
    run = replay(engine, wanted)
    same = [SimulatedRequest(at, one.prompt, one.max_tokens) for at, one in zip(run.at, wanted, strict=True)]
    predicted = figures(Simulation(settings, Linear(seconds)).run(same, count))
    return {
        "seconds_of_step_token_pair": list(seconds),
        "requests_per_second": rate,
        "measured": run.figures,
        "predicted": predicted,
        "error": {name: predicted[name] / run.figures[name] - 1 for name in _FIGURES},
    }


def settings_of(engine: LLMEngine) -> EngineSettings:
    """The limits of the real engine."""
    config = engine.config
    limits = config.scheduler
    assert limits.max_num_seqs is not None and limits.max_num_batched_tokens is not None
    assert limits.max_num_mixed_tokens is not None, "LLMEngine sets it"
    return EngineSettings(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        engine.kv_tokens // config.block_tokens,
        config.block_tokens,
        config.cache.enable_prefix_caching,
        max_num_mixed_tokens=limits.max_num_mixed_tokens,
    )


def fit(engine: LLMEngine, settings: EngineSettings, seed: int) -> NDArray[np.float64]:
    """Seconds of a step, of a token and of an attended position, from timed batches; none below 0."""
    rng = np.random.default_rng(seed)
    counts = []
    times = []
    for number, prompt, output in (_BATCHES[0], *_BATCHES):  # the first one warms up
        prompts = random_prompts(engine, rng, number, prompt)
        times.append(timed(engine, prompts, [fixed_length(output)] * number).seconds)
        counted = Linear()
        shape = Workload(number, input_len=prompt, output_len=output, seed=seed)
        Simulation(settings, counted).run(requests(shape), number)
        counts.append(counted.counts)
    measured = np.array(times[1:])
    weighted = np.array(counts[1:]) / measured[:, None]  # relative errors count
    kept = list(range(3))
    while True:
        found = np.linalg.lstsq(weighted[:, kept], np.ones(len(measured)), rcond=None)[0]
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    seconds = np.zeros(3)
    seconds[kept] = found
    return seconds


@dataclass(frozen=True)
class _Replay:
    at: list[float]
    """When the engine got each request, in seconds since the start."""
    figures: dict[str, float]


def replay(engine: LLMEngine, wanted: Sequence[SimulatedRequest]) -> _Replay:
    """Send the requests at their times, and wait for all of them."""
    started = time.perf_counter()
    ids: list[int] = []
    done: dict[int, Generated] = {}
    while len(done) < len(wanted):
        while len(ids) < len(wanted) and wanted[len(ids)].at <= time.perf_counter() - started:
            one = wanted[len(ids)]
            ids += engine.add_request([unpack_ids(one.prompt).tolist()], [fixed_length(one.max_tokens)])
        done.update((sequence.request_id, sequence) for sequence in engine.step())
    found = [done[request_id] for request_id in ids]
    first = found[0].submitted
    seconds = max(one.finished for one in found) - first
    ttft = np.array([one.ttft for one in found])
    measured = {
        "output_tokens_per_second": sum(len(one.token_ids) for one in found) / seconds,
        "ttft_mean": float(ttft.mean()),
        "ttft_p50": float(np.percentile(ttft, 50)),
        "ttft_p90": float(np.percentile(ttft, 90)),
        "tpot_mean": float(np.mean([one.tpot for one in found if len(one.token_ids) > 1])),
    }
    return _Replay([one.submitted - first for one in found], measured)


def figures(outcome: Outcome) -> dict[str, float]:
    """The same of a simulation."""
    ttft = {f"ttft_{name}": outcome.ttft[name] for name in ("mean", "p50", "p90")}
    return {
        "output_tokens_per_second": outcome.output_tokens_per_second,
        **ttft,
        "tpot_mean": outcome.tpot["mean"],
    }


def text(one: dict[str, Any]) -> str:
    """A round as text."""
    lines = [f"{one['requests_per_second']:.2f} requests/s"]
    for name in _FIGURES:
        measured = one["measured"][name]
        predicted = one["predicted"][name]
        error = one["error"][name]
        lines.append(f"  {name:26} measured {measured:8.3f}, predicted {predicted:8.3f} ({error:+.0%})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
