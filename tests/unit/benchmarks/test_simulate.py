"""The simulation: its times, its determinism, and that its workers compute what the scheduler asks for."""

import pytest

from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.messages.engine import pack_ids
from benchmarks.simulate import _parser, simulate
from benchmarks.simulation.engines import EngineSettings
from benchmarks.simulation.requests import SimulatedRequest, Workload, requests
from benchmarks.simulation.roofline import Work
from benchmarks.simulation.simulate import Outcome, Simulation

SETTINGS = EngineSettings(max_num_seqs=8, max_num_batched_tokens=16, num_kv_blocks=64, block_size=4)


class Recorder:
    """A cost of a second for each step, which keeps what was computed."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def __call__(self, work: Work, all_tokens: float) -> float:
        self.works.append(work)
        return 1.0


def request(at: float, length: int, max_tokens: int, first: int = 100) -> SimulatedRequest:
    return SimulatedRequest(at, pack_ids(range(first, first + length)), max_tokens)


def run(wanted: list[SimulatedRequest], cost: Recorder, **options: object) -> tuple[Simulation, Outcome]:
    simulation = Simulation(SETTINGS, cost, **options)  # type: ignore[arg-type]
    outcome = simulation.run(wanted, len(wanted))
    for engine in simulation.engines:
        engine.check_integrity()
    return simulation, outcome


def test_a_request_alone() -> None:
    cost = Recorder()
    _, outcome = run([request(5.0, 10, 3)], cost)
    assert (outcome.ttft["mean"], outcome.tpot["mean"], outcome.seconds, outcome.steps) == (1.0, 1.0, 3.0, 3)
    prefill, first, second = cost.works
    assert prefill == Work(chunk_tokens=10, chunk_pairs=55, chunk_context=10)
    assert (first, second) == (Work(rows=1, context=11), Work(rows=1, context=12))


def test_a_long_prompt_is_computed_in_chunks_while_another_decodes() -> None:
    cost = Recorder()
    _, outcome = run([request(0.0, 4, 9), request(0.5, 40, 1, first=500)], cost)
    chunks = [work.chunk_tokens for work in cost.works if work.chunk_tokens]
    assert chunks[0] == 4 and sum(chunks) == 44
    assert all(work.tokens <= SETTINGS.max_num_batched_tokens for work in cost.works)
    assert sum(work.rows for work in cost.works) == 8
    pairs = sum(work.chunk_pairs for work in cost.works)
    assert pairs == 4 * 5 // 2 + 40 * 41 // 2
    assert outcome.preemptions == 0


def test_everything_is_computed_once_without_shared_prefixes() -> None:
    workload = Workload(60, rate=3.0, input_len=30, output_len=12, range_ratio=0.2, seed=3)
    wanted, cost = list(requests(workload)), Recorder()
    simulation, outcome = run(wanted, cost, ranks=3, frontends=2, policy="least_tokens")
    prompts = sum(len(one.prompt) // 4 for one in wanted)
    outputs = sum(one.max_tokens for one in wanted)
    assert sum(work.tokens for work in cost.works) == prompts + outputs - len(wanted)
    assert sum(engine.computed_tokens for engine in simulation.engines) == prompts + outputs - len(wanted)
    assert outcome.cached_share == 0.0 and outcome.imbalance < 1.5


def test_the_same_seed_gives_the_same_figures() -> None:
    def once(seed: int) -> Outcome:
        workload = Workload(40, 2.0, 20, 8, 0.5, prefixes=3, prefix_len=12, seed=seed)
        return run(list(requests(workload)), Recorder(), ranks=2)[1]

    assert once(1) == once(1) != once(2)


def test_prefix_routing_finds_more_cached_tokens() -> None:
    def share(policy: str) -> float:
        workload = Workload(120, 2.0, 6, 4, 1.0, prefixes=6, prefix_len=24, seed=1)
        return run(list(requests(workload)), Recorder(), ranks=4, policy=policy)[1].cached_share

    assert share("prefix") > share("round_robin") > 0.3


def test_engines_in_lockstep_step_together() -> None:
    cost = Recorder()
    wanted = [request(0.0, 4, 3), request(0.25, 4, 3, first=300)]
    _, outcome = run(wanted, cost, ranks=2, lockstep=True, policy="round_robin")
    # The second request waits for the step that runs when it arrives.
    assert outcome.ttft["mean"] == pytest.approx((1.0 + 1.75) / 2)
    assert outcome.seconds == 4.0 and outcome.busy == 1.0


def test_full_caches_preempt() -> None:
    wanted = [request(0.0, 15, 60, first=100 * index) for index in range(6)]
    _, outcome = run(wanted, Recorder())
    assert outcome.preemptions > 0


def test_a_request_that_no_engine_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="KV cache is too small"):
        run([request(0.0, 400, 10)], Recorder())


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--prefixes", "4"], "give both"),
        (["--enable-expert-parallel"], "has no experts"),
        (["--model", "DeepSeek-V3"], "do not fit"),
        (["--model", "none"], "shipped are"),
    ],
)
def test_flags_that_exclude_each_other(flags: list[str], problem: str) -> None:
    with pytest.raises(BenchmarkError, match=problem):
        simulate(_parser().parse_args(flags), "prefix")


def test_the_command_line() -> None:
    flags = [
        "--model",
        "Qwen3-30B-A3B",
        "--ranks",
        "4",
        "--requests",
        "12",
        "--rate",
        "50",
        "--output-len",
        "8",
    ]
    args = _parser().parse_args([*flags, "--enable-expert-parallel", "--num-kv-blocks", "300"])
    row = simulate(args, "prefix")
    assert row["requests"] == 12 and 0 < row["ttft"]["mean"] < 0.2 and row["ranks"] == 4
