"""The table, the JSON file and the sweep."""

import argparse
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from atom.benchmarks.backend_request_func import RequestFuncOutput
from atom.benchmarks.serving.metrics import BenchmarkMetrics, calculate_metrics
from atom.benchmarks.serving.report import failures, file_name, make_result, result_lines, write_result
from atom.benchmarks.serving.speculation import Speculation
from atom.benchmarks.serving.sweep import Point, point_args, save_plot, table, write_sweep

Parse = Callable[..., argparse.Namespace]

NOW = datetime(2030, 1, 2, 3, 4, 5)
KEYS = {
    *("date", "backend", "model_id", "tokenizer_id", "best_of", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "request_goodput:", "output_throughput"),
    *("total_token_throughput", "concurrency", "accept_length", "acceptance_rate"),
    "forced_acceptance_length",
}
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}
OUTPUTS = [
    RequestFuncOutput("ab", True, 0.5, 3, 0.1, [0.2, 0.2], prompt_len=10),
    RequestFuncOutput(prompt_len=10, error="status 500"),
]


def metrics_of(args: argparse.Namespace) -> BenchmarkMetrics:
    return calculate_metrics(OUTPUTS, 2.0, args.metric_percentiles, dict(args.goodput or []))


def result_of(args: argparse.Namespace, speculation: Speculation | None = None) -> dict[str, Any]:
    return make_result(args, metrics_of(args), OUTPUTS, speculation, NOW)


def statistics(*metrics: str, percentiles: tuple[str, ...] = ("99",)) -> set[str]:
    names = ("mean", "median", "std", *(f"p{percentile}" for percentile in percentiles))
    return {f"{name}_{metric}_ms" for name in names for metric in metrics}


def test_keys_of_the_file(parse: Parse) -> None:
    result = result_of(parse())
    assert set(result) == KEYS | statistics("ttft", "tpot", "itl")
    assert (result["date"], result["request_rate"], result["request_goodput:"]) == (
        "20300102-030405",
        "inf",
        None,
    )
    flags = ["--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9", "--save-detailed"]
    result = result_of(parse(*flags, "--metadata", "tp=8", "--goodput", "ttft:200"))
    assert set(result) == KEYS | DETAILS | {"tp"} | statistics("ttft", "e2el", percentiles=("50", "99.9"))
    assert result["tp"] == "8" and result["request_goodput"] == result["request_goodput:"] == 0.5
    assert result["output_lens"] == [3, 0] and result["errors"] == ["", "status 500"]
    assert result["ttfts"] == [0.1, 0.0] and result["itls"] == [[0.2, 0.2], []]


def test_speculation_is_in_the_file(parse: Parse) -> None:
    result = result_of(parse(), Speculation(drafts=10, drafted=30, accepted=15))
    assert (result["accept_length"], result["acceptance_rate"]) == (2.5, 0.5)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "vllm-infqps-tiny-20300102-030405.json"),
        (["--request-rate", "5"], "vllm-5.0qps-tiny-20300102-030405.json"),
        (["--max-concurrency", "8"], "vllm-infqps-concurrency8-tiny-20300102-030405.json"),
        (["--result-filename", "x.json"], "x.json"),
    ],
)
def test_file_names(parse: Parse, flags: list[str], name: str) -> None:
    args = parse(*flags)
    assert file_name(args, result_of(args)) == name


def test_written_files(parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse("--result-dir", tmp_path / "new", "--result-filename", "x.json")
    result = result_of(args)
    monkeypatch.delenv("SAVE_TO_PYTORCH_BENCHMARK_FORMAT", raising=False)
    (path,) = write_result(args, result)
    assert json.loads(path.read_text()) == result
    monkeypatch.setenv("SAVE_TO_PYTORCH_BENCHMARK_FORMAT", "1")
    _, pytorch = write_result(args, result)
    assert pytorch.name == "x.pytorch.json"
    records = {one["metric"]["name"]: one for one in json.loads(pytorch.read_text())}
    assert set(records) == statistics("ttft", "tpot", "itl")
    assert records["median_ttft_ms"]["metric"]["benchmark_values"] == [result["median_ttft_ms"]]


def test_the_table(parse: Parse) -> None:
    args = parse("--goodput", "ttft:200")
    lines = result_lines(args, metrics_of(args))
    assert lines[0] == "============ Serving Benchmark Result ============"
    shown = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines) if value
    }
    assert shown == {
        "Successful requests": "1",
        "Benchmark duration (s)": "2.00",
        "Total input tokens": "10",
        "Total generated tokens": "3",
        "Request throughput (req/s)": "0.50",
        "Request goodput (req/s)": "0.50",
        "Output token throughput (tok/s)": "1.50",
        "Total Token throughput (tok/s)": "6.50",
        **{f"{name} TTFT (ms)": "100.00" for name in ("Mean", "Median", "P99")},
        **{
            f"{name} {metric} (ms)": "200.00"
            for name in ("Mean", "Median", "P99")
            for metric in ("TPOT", "ITL")
        },
    }


def test_failures_are_counted_by_their_text() -> None:
    failed = [RequestFuncOutput(error=error) for error in ("b", "a", "a")]
    assert failures([*OUTPUTS[:1], *failed]) == ["2 of 4 requests failed: a", "1 of 4 requests failed: b"]


def test_runs_of_a_sweep(parse: Parse) -> None:
    runs = point_args(parse("--sweep", 16, 1, 16, "--result-filename", "r.json"))
    assert [(run.max_concurrency, run.num_prompts) for run in runs] == [(1, 10), (16, 160)]
    assert [run.result_filename for run in runs] == ["r-concurrency1.json", "r-concurrency16.json"]
    runs = point_args(parse("--sweep", 2, 4, "--num-prompts", 7))
    assert [run.num_prompts for run in runs] == [7, 7]


def points(args: argparse.Namespace) -> list[Point]:
    return [Point.of(concurrency, metrics_of(args)) for concurrency in (1, 16)]


def test_the_table_of_a_sweep(parse: Parse) -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(points(parse()))]
    named = dict(zip(rows[0], rows[2], strict=True))
    assert named["concurrency"] == "1" and named["output tok/s"] == "1.50"
    assert named["tok/s per user"] == "5.00" and named["TPOT ms"] == "200.00"
    assert "goodput req/s" not in named and rows[3][0] == "16"
    lines = table(points(parse("--goodput", "ttft:200")))
    assert "goodput req/s" in lines[0] and len({len(line) for line in lines}) == 1


def test_the_plot_of_a_sweep(parse: Parse, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    args = parse("--sweep", 1, 16, "--result-dir", tmp_path, "--result-filename", "v1.5.json")
    text, plot = write_sweep(args, points(args), "date")
    assert (text.name, plot.name) == ("v1.5-sweep.md", "v1.5-sweep.png")
    assert plot.read_bytes().startswith(b"\x89PNG") and text.read_text().count("\n") == 4
    save_plot(points(args)[:1], "one point", plot)
