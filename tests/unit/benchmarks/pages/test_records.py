"""Results that are kept, and the document that is made of them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks import record
from benchmarks.gpu_runs.gpu_results import ResultFile, Settings
from benchmarks.gpu_runs.gpu_rows import Measured
from benchmarks.pages.document import document
from benchmarks.pages.records import completed, read_record
from tests.helpers.source import ROOT

FACTS = {"command": "python -m x --y 1", "hardware": "CPU: one", "software": "ATOM 1", "date": "2026-01-02"}
SPREAD = {"10": 0.1, "50": 0.2, "99": 0.4}
RESULTS: dict[str, dict[str, Any]] = {
    "latency": {
        "batch_size": 8, "input_len": 32, "output_len": 128, "n": 1, "avg_latency": 2.5, "latencies": [2.5],
        "percentiles": SPREAD, "avg_ttft": 0.25, "ttft_percentiles": SPREAD, "avg_tpot": 0.025,
        "tpot_percentiles": SPREAD, "output_tokens_per_second": 409.6,
    },
    "throughput": {
        "dataset": "random", "elapsed_time": 2.0, "num_requests": 1500, "total_num_tokens": 3000,
        "total_input_tokens": 1000, "total_output_tokens": 2000, "requests_per_second": 750.0,
        "tokens_per_second": 1500.0, "output_tokens_per_second": 1000.0,
    },
    "kernels": {
        "model": "M", "device": "cpu", "dtype": "float32", "threads": 2, "copy_bytes_per_s": 2e10,
        "matmul_flops_per_s": 1e11,
        "rows": [
            {
                "op": "linear", "provider": "torch", "step": "decode-1", "shape": "qkv 1x2x3",
                "bound": "memory", "microseconds": 20.0, "best_microseconds": 19.0,
                "floor_microseconds": 5.0, "of_roofline": 0.25, "bytes": 10, "flops": 2.0, "timed": "call",
            },
            {"op": "route", "provider": "torch", "step": "", "shape": "own case", "microseconds": 3.0},
        ],
    },
    "all_reduce": {
        "ranks": 2, "device": "cuda", "dtype": "bfloat16", "width": 4096,
        "rows": [{"tokens": 1024, "two_calls_us": 61.25, "communicator_us": 40.0, "one_kernel": True}],
    },
    "decode_step": {
        "model": "M", "dtype": "bfloat16", "context": 512, "method": "ngram", "drafts": 3,
        "rows": [
            {
                "rows": 1, "tokens": 2.5, "ahead_ms": 4.25, "device_ms": 4.5, "launch_ms": 0.1, "kernels": 7,
                "kernels_per_layer": 3.5, "times": [{"name": "_gemm", "runs": 6, "microseconds": 4000.0}],
            },
        ],
    },
    "scheduler": {"rows": [{"running": 1024, "median_us": 120.04, "p99_us": 300.0, "ratio": 1.0}]},
    "accuracy": {
        "model": "M", "dtype": "float32", "harness": "lm-eval 1", "answers": 140, "scores": 112,
        "different_texts": 0, "different_flags": 0, "largest_difference": 7e-5,
        "rows": [{"task": "capitals", "metric": "acc", "server": 0.75, "transformers": 0.75, "file": 0.5}],
    },
}  # fmt: skip
SERVING = {
    "date": "20260102-101112", "backend": "vllm", "model_id": "m", "tokenizer_id": "m", "request_rate": "inf",
    "max_concurrency": None, "duration": 3.0, "completed": 12, "total_input_tokens": 60,
    "total_output_tokens": 120, "request_throughput": 4.0, "output_throughput": 40.0,
    "total_token_throughput": 60.0, "ttfts": [0.1] * 12, "generated_texts": ["x"] * 12,
    "mean_ttft_ms": 1.5, "median_ttft_ms": 1.25, "p99_ttft_ms": 9.0,
    "mean_tpot_ms": 0.5, "median_tpot_ms": 0.25, "p99_tpot_ms": 0.75,
}  # fmt: skip
SECTIONS = {"all_reduce": "all-reduce", "decode_step": "decode steps"}
"""Titles that differ from the kind."""
SAID = {"command": "bench", "server": "atom-launch", "hardware": "GPU", "software": "ATOM 1"}
ROWS = {
    "latency": [
        "8 requests of 32 tokens in and 128 out: 409.6",
        "| whole batch | 2500.00 | 100.00 | 200.00 | 400.00 |",
    ],
    "throughput": ["| 1,500 | 1,000 | 2,000 | 2.00 | 750.00 | 1,500.00 | 1,000.00 |"],
    "kernels": ["| linear | torch | decode-1 | qkv 1x2x3 | memory | 20.0 | 5.0 | 25% |", "copies 20.0 GB/s"],
    "all_reduce": ["2 ranks (cuda), bfloat16, width 4,096.", "| 1,024 | 61.2 | 40.0 | yes |"],
    "decode_step": [
        "M in bfloat16, contexts of 512 tokens, 3 drafts of ngram.",
        "| `_gemm` 6 x, 4,000.0 | 1 | 2.50 | 4.250 | 4.500 | 7 |",
    ],
    "scheduler": ["| 1,024 | 120.0 | 300.0 | 1.00 |"],
    "accuracy": ["| capitals | acc | 0.7500 | 0.7500 | 0.5000 |", "of 112 log probabilities: 7.0e-05"],
    "serving": ["12 requests in 3.0 s", "at most all at once: 4.00", "| TPOT | 0.50 | 0.25 | 0.75 |"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One kept result of each kind, and one of the GPU benchmark."""
    for kind, figures in RESULTS.items():
        result = {"benchmark": kind, **FACTS, **figures}
        (tmp_path / f"a-{kind}.json").write_text(json.dumps(completed(result, {}, "f")))
    (tmp_path / "served.json").write_text(json.dumps(completed(SERVING, SAID, "f")))
    ResultFile(tmp_path, "Qwen3-8B").add(
        Settings("2 GPUs", "ATOM 1", {}), "batch-1", Measured(4.0, [1.0], [])
    )
    return tmp_path


def test_each_kind_has_its_table_and_its_facts(folder: Path) -> None:
    text = document(folder)
    sections = {part.splitlines()[0].lower(): part for part in text.split("\n## ")[1:]}
    assert list(sections) == [
        "offline engine on a gpu",
        "serving",
        "throughput",
        "latency",
        "kernels",
        "all-reduce",
        "decode steps",
        "scheduler",
        "accuracy",
    ]
    for kind, lines in ROWS.items():
        assert all(line in sections[SECTIONS.get(kind, kind)] for line in lines), sections
    for kind in RESULTS:
        facts = [
            "### a-" + kind,
            "- Hardware: CPU: one",
            "- Command: `python -m x --y 1`",
            "- Date: 2026-01-02",
        ]
        assert all(fact in sections[SECTIONS.get(kind, kind)] for fact in facts)
    assert "- Server: `atom-launch`" in sections["serving"] and "- Date: 2026-01-02" in sections["serving"]
    assert "own case" not in text and "| `batch-1` |" in sections["offline engine on a gpu"]


def test_what_there_is_for_each_request_is_not_kept() -> None:
    kept = completed(SERVING, SAID, "f")
    assert not kept.keys() & {"ttfts", "generated_texts"} and kept["mean_ttft_ms"] == 1.5
    assert list(kept)[:6] == ["benchmark", "command", "hardware", "software", "date", "server"]


@pytest.mark.parametrize(
    ("result", "said", "message"),
    [
        ({"rows": []}, {}, "f holds no result of a benchmark: serving, throughput"),
        (SERVING, {**SAID, "server": None}, "f does not say its server: give --server"),
        (SERVING, {**SAID, "command": ""}, "f does not say its command: give --command"),
        (
            {"benchmark": "latency", **FACTS},
            {"hardware": "GPU"},
            "f says hardware 'CPU: one': leave --hardware out",
        ),
        ({"benchmark": "latency", **FACTS}, {"server": "x"}, "--server does not belong to a latency result"),
    ],
)
def test_a_figure_without_its_facts_is_refused(
    result: dict[str, Any], said: dict[str, str | None], message: str
) -> None:
    with pytest.raises(BenchmarkError) as refused:
        completed(result, said, "f")
    assert str(refused.value).startswith(message)


def keep(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> str:
    places = ["--results", str(folder / "kept"), "--document", str(folder / "new" / "benchmarks.md")]
    monkeypatch.setattr(sys, "argv", ["record", *arguments, *places])
    record.main()
    return (folder / "new" / "benchmarks.md").read_text()


def test_a_result_is_kept_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text(json.dumps({"benchmark": "latency", **FACTS, **RESULTS["latency"]}))
    first = keep(monkeypatch, tmp_path, str(file), "--name", "small")
    assert "### small" in first and "latencies" not in read_record(tmp_path / "kept/small.json").figures
    file.write_text(json.dumps(SERVING))
    flags = [word for name in ("command", "server", "hardware") for word in (f"--{name}", SAID[name])]
    second = keep(monkeypatch, tmp_path, str(file), *flags)
    assert "### small" in second and "### out" in second
    assert keep(monkeypatch, tmp_path) == second


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("[]", [], "holds no result of a benchmark"),
        ("{", [], "Expecting property name"),
        ("{}", ["--name", "../x"], "--name ../x: letters, digits"),
    ],
)
def test_bad_files_and_names_are_one_line(
    content: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(SystemExit) as ended:
        keep(monkeypatch, tmp_path, str(tmp_path / "x.json"), *arguments)
    said = str(ended.value.code)
    assert said.startswith("error: ") and message in said and "\n" not in said
    assert not (tmp_path / "kept").exists()


def test_facts_need_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the flags describe a result: name its FILE"):
        keep(monkeypatch, tmp_path, "--hardware", "GPU")


def test_the_document_is_that_of_the_kept_results() -> None:
    shipped = (ROOT / "docs/measurements/benchmarks.md").read_text(encoding="utf-8")
    assert document(ROOT / "docs/measurements/results") == shipped, "run `make bench-document`"
