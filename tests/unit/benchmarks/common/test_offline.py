"""Figures, flags and refusals of the offline benchmarks, without an engine."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.shared.outputs import Sequence
from benchmarks import latency, scheduler, throughput
from benchmarks.common.offline import Run, fixed_length, timed
from benchmarks.common.report import command_line


def sequence(request_id: int, generated: int, error: str = "") -> Sequence:
    """A prompt of 5 tokens, the first token after 0.2 s, each later one after 10 ms more."""
    return Sequence(
        request_id,
        prompt_token_ids=[1] * 5,
        token_ids=[2] * generated,
        error=error,
        submitted=1.0,
        first_token=1.2,
        finished=1.2 + 0.01 * (generated - 1),
    )


class FakeEngine:
    """Ends requests one by one, the last one first."""

    def __init__(self, make: Callable[[int, int], Sequence] = sequence):
        self._make = make
        self._waiting: list[Sequence] = []

    def add_request(self, prompts: list[Any], params: list[Any], predictions: Any = None) -> list[int]:
        wanted = [one.max_tokens for one in params for _ in range(one.n)]
        self._waiting = [self._make(index, count) for index, count in enumerate(wanted)]
        return list(range(len(wanted)))

    def step(self) -> list[Sequence]:
        return [self._waiting.pop()]


def run_on(engine: FakeEngine, *lengths: int, n: int = 1) -> Run:
    return timed(engine, [[1]] * len(lengths), [fixed_length(length, n) for length in lengths])  # type: ignore[arg-type]


def test_requests_come_back_in_the_order_of_their_prompts() -> None:
    run = run_on(FakeEngine(), 3, 7, n=2)
    assert [one.request_id for one in run.sequences] == [0, 1, 2, 3]
    assert (run.input_tokens, run.output_tokens) == (20, 20) and run.seconds > 0


def test_a_request_that_fails_or_ends_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 requests failed: no room"):
        run_on(FakeEngine(lambda index, count: sequence(index, count, "no room" if index else "")), 3, 3)
    with pytest.raises(RuntimeError, match="expected 6 tokens, got 5"):
        run_on(FakeEngine(lambda index, count: sequence(index, count - index)), 3, 3)


def test_latency_has_batches_and_tokens() -> None:
    runs = [Run(seconds, [sequence(0, 11), sequence(1, 11)]) for seconds in (1.0, 2.0, 6.0)]
    args = argparse.Namespace(batch_size=2, input_len=5, output_len=11, n=1)
    result = latency.figures(runs, args)
    assert result["avg_latency"] == 3.0 and result["latencies"] == [1.0, 2.0, 6.0]
    assert result["percentiles"]["50"] == 2.0 and list(result["percentiles"]) == [
        "10",
        "25",
        "50",
        "75",
        "90",
        "99",
    ]
    assert result["avg_ttft"] == pytest.approx(0.2) and result["avg_tpot"] == pytest.approx(0.01)
    assert result["output_tokens_per_second"] == pytest.approx(66 / 9)
    lines = latency.text(result).splitlines()
    assert lines[1].split()[:3] == ["whole", "batch", "3000.00"] and lines[3].split()[3] == "10.00"


def test_throughput_counts_a_prompt_once_and_every_sequence() -> None:
    run = Run(2.0, [sequence(index, 10) for index in range(6)])
    args = argparse.Namespace(n=2, dataset_name="random")
    result = throughput.figures(run, args)
    assert (result["num_requests"], result["total_input_tokens"], result["total_output_tokens"]) == (
        3,
        15,
        60,
    )
    assert result["requests_per_second"] == 1.5 and result["tokens_per_second"] == 37.5
    assert result["output_tokens_per_second"] == 30.0 and result["elapsed_time"] == 2.0
    assert "1.50 requests/s, 37.50 total tokens/s, 30.00 output tokens/s" in throughput.text(result)


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (latency.main, ["--batch-size", "0"], "error: --batch-size: 0 is less than 1"),
        (latency.main, ["--num-iters-warmup", "-1"], "error: --num-iters-warmup: -1 is less than 0"),
        (latency.main, ["--input-len", "x"], "error: --input-len: 'x' is not a whole number"),
        (latency.main, ["--batchsize", "3"], "error: unknown flag --batchsize: did you mean --batch-size?"),
        (latency.main, ["--output-json", "."], "error: --output-json: . is a directory: name a file"),
        (latency.main, ["--model", "/nowhere"], "error: --model /nowhere: no such path"),
        (throughput.main, ["--dataset-path", "x"], "error: --dataset-path is for --dataset-name sharegpt"),
        (
            throughput.main,
            ["--dataset-name", "sharegpt"],
            "error: --dataset-name sharegpt needs --dataset-path",
        ),
        (
            throughput.main,
            ["--dataset-name", "burstgpt"],
            "error: --dataset-name: invalid choice: 'burstgpt'",
        ),
        (
            throughput.main,
            ["--dataset-name", "sharegpt", "--dataset", "/nowhere"],
            "error: --dataset-path /nowhere: no such file",
        ),
        (
            throughput.main,
            ["--dataset-name", "sharegpt", "--dataset-path", __file__, "--input-len", "3"],
            "error: --input-len and --prefix-len are for random prompts",
        ),
        (scheduler.main, ["--steps", "0"], "error: --steps: 0 is less than 1"),
    ],
)
def test_invalid_flags_are_one_line(
    main: Callable[[], None],
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err or f"{ended.value.code}\n"
    assert said.startswith(message) and said.count("\n") == 1


def test_the_scheduler_benchmark_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "scheduler.json"
    flags = ["--running", "2", "8", "--steps", "60", "--output-json", str(file)]
    monkeypatch.setattr(sys, "argv", ["scheduler", *flags])
    scheduler.main()
    result = json.loads(file.read_text())
    assert [row["running"] for row in result["rows"]] == [2, 8] and result["rows"][0]["ratio"] == 1.0
    assert result["command"] == "python -m benchmarks.scheduler --running 2 8 --steps 60"
    assert result["hardware"].startswith("CPU: ") and len(result["date"]) == 10
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--model", "/a/b/c", "--n", "2"], "--model c --n 2"),
        (["--output-json", "/x/y.json", "--seed", "1"], "--seed 1"),
        (["--output_json=/x/y.json", "--model=./m/n"], "--model=n"),
        (["--model", "owner/name", "--dtype", "a b"], "--model owner/name --dtype 'a b'"),
    ],
)
def test_commands_omit_directories_of_the_machine(arguments: list[str], shown: str) -> None:
    assert command_line("m", arguments) == f"python -m m {shown}"
