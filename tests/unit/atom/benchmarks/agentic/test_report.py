"""Figures of a run: first and later turns, hit rates, goodput, sessions, and the file."""

import json
from datetime import datetime
from pathlib import Path

from atom.benchmarks.agentic.flags import check, make_parser
from atom.benchmarks.agentic.replay import TurnResult
from atom.benchmarks.agentic.report import measure, report_lines, write_report
from atom.benchmarks.backend_request_func import RequestFuncOutput


def result(session: str, turn: int, ttft: float, known: int, cached: int | None) -> TurnResult:
    output = RequestFuncOutput(
        success=True,
        ttft=ttft,
        latency=ttft + 0.9,
        itl=[0.1] * 9,
        output_tokens=10,
        prompt_tokens=100,
        cached_tokens=cached,
    )
    return TurnResult(session, turn, known, output)


RESULTS = [
    result("a", 0, 0.4, 0, 0),
    result("a", 1, 0.1, 90, 80),
    result("b", 0, 0.6, 50, 48),
    TurnResult("b", 1, 100, RequestFuncOutput(error="gone")),
]


def test_figures() -> None:
    found = measure(RESULTS, 2.0, [99], {"ttft": 500})
    assert (found.first_ttft_ms, found.later_ttft_ms) == (500, 100)
    assert found.known_rate == 140 / 300
    assert found.hit_rate == 128 / 300
    assert found.good_output_throughput == 10
    assert found.serving.good == 2
    sessions = [(each.session, each.turns, each.failed, each.cached_tokens) for each in found.sessions]
    assert sessions == [("a", 2, 0, 80), ("b", 2, 1, 48)]


def test_a_server_without_counts_of_the_cache() -> None:
    found = measure([result("a", 0, 0.1, 0, None)], 1.0, [99], {})
    assert found.hit_rate is None and found.good_output_throughput is None
    args = make_parser().parse_args(["--model", "m", "--num-gpus", "2"])
    check(args)
    lines = report_lines(args, found)
    assert any("usage has no cached_tokens" in line for line in lines)
    assert any(line.endswith(" 5.00") and "per GPU" in line for line in lines)


def test_no_request_succeeded() -> None:
    found = measure(RESULTS[3:], 1.0, [99], {"ttft": 1})
    assert found.serving.completed == 0 and found.hit_rate is None and found.known_rate == 0


def test_the_file_has_flags_figures_and_sessions(tmp_path: Path) -> None:
    args = make_parser().parse_args(["--model", "a/m", "--result-dir", str(tmp_path / "new")])
    check(args)
    path = write_report(args, measure(RESULTS, 2.0, [99], {}), datetime(2026, 1, 2))
    assert path.name == "agentic-m-20260102-000000.json"
    content = json.loads(path.read_text())
    assert content["flags"]["session_rate"] == "inf"
    assert content["serving"]["output_throughput"] == 15
    assert len(content["sessions"]) == 2
