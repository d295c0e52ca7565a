"""The serving benchmark as users run it: against our server, and against a clock."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from atom.benchmarks.benchmark_serving import main
from tests.helpers.checkpoints import tiny_hf_tokenizer
from tests.helpers.servers import random_server
from tests.helpers.servers.server import Server, running_server
from tests.helpers.servers.token_clock import running_clock

DEADLINE_S = 150
SERVER_FLAGS = ("--load-dummy", "--dtype", "float32", "--device", "cpu", "--cpu-threads", "1")
SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1}
DOCUMENTED = {
    *("date", "backend", "model_id", "tokenizer_id", "best_of", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput:", "output_throughput", "total_token_throughput"),
    *(
        f"{statistic}_{metric}_ms"
        for statistic in ("mean", "median", "std", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    ),
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = random_server.write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", **SMALL)
    return tiny_hf_tokenizer.write(directory)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    traces = ("--torch-profiler-dir", str(model.parent / "traces"))
    with running_server("--model", str(model), *SERVER_FLAGS, *traces) as running:
        yield running


def run(folder: Path, *flags: object) -> int:
    """The exit status; in this process, where the libraries are imported already."""
    return main([*map(str, flags), "--disable-tqdm", "--result-dir", str(folder)])


def result_of(folder: Path, *flags: object) -> dict[str, Any]:
    assert run(folder, *flags, "--save-result", "--save-detailed", "--result-filename", "result.json") == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_the_documented_command_gives_every_documented_key(
    server: Server, model: Path, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, "-m", "atom.benchmarks.benchmark_serving"),
        *(f"--model={model}", "--backend=vllm", f"--base-url={server.url}", "--dataset-name=random"),
        *("--random-input-len=24", "--random-output-len=16", "--random-range-ratio", "0.8"),
        *("--num-prompts=40", "--max-concurrency=4", "--request-rate=inf", "--ignore-eos"),
        *("--save-result", "--percentile-metrics=ttft,tpot,itl,e2el"),
        *(f"--result-dir={tmp_path}/", "--result-filename=tiny-result.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "tiny-result.json").read_text())
    assert set(result) >= DOCUMENTED
    assert (result["completed"], result["num_prompts"], result["max_concurrency"]) == (40, 40, 4)
    assert 40 * 19 <= result["total_input_tokens"] <= 40 * 24
    assert 40 * 12 <= result["total_output_tokens"] <= 40 * 16
    # On a busy machine the few tokens of a request may arrive together.
    assert 0 <= result["median_tpot_ms"] < result["median_e2el_ms"]
    assert "Serving Benchmark Result" in done.stdout and "Successful requests:" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"],
        ["--backend", "sglang", "--use-chat-template"],
        ["--request-rate", "50", "--burstiness", "0.5", "--logprobs", "2"],
    ],
)
def test_other_ways_to_ask_our_server(server: Server, model: Path, tmp_path: Path, flags: list[str]) -> None:
    lengths = ["--random-input-len", 30, "--random-output-len", 8, "--num-prompts", 6]
    common = ["--model", model, "--base-url", server.url, "--dataset-name", "random", "--ignore-eos"]
    result = result_of(tmp_path, *common, *lengths, *flags)
    assert result["errors"] == [""] * 6 and result["output_lens"] == [8] * 6
    assert result["input_lens"] == [30] * 6 and all(len(gaps) <= 7 for gaps in result["itls"])


def test_the_profiler_runs_during_the_benchmark(server: Server, model: Path, tmp_path: Path) -> None:
    lengths = ["--random-input-len", 8, "--random-output-len", 4, "--num-prompts", 4]
    common = ["--model", model, "--base-url", server.url, "--dataset-name", "random"]
    assert run(tmp_path, *common, *lengths, "--profile") == 0
    assert len(list((model.parent / "traces").rglob("*.pt.trace.json.gz"))) == 1


@pytest.mark.slow
def test_a_model_without_tokenizer_is_sent_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = random_server.write_checkpoint(tmp_path / "ids", **SMALL)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (directory / name).unlink()
    flags = ["--model", directory, "--dataset-name", "random", "--random-input-len", 9, "--num-prompts", 3]
    with running_server("--model", str(directory), *SERVER_FLAGS) as ready:
        result = result_of(
            tmp_path, *flags, "--base-url", ready.url, "--random-output-len", 5, "--ignore-eos"
        )
    assert result["output_lens"] == [5] * 3 and result["input_lens"] == [9] * 3
    assert run(tmp_path, *flags, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions") == 1
    assert "takes only text: set --tokenizer" in capsys.readouterr().err


def clock_flags(model: Path, url: str) -> list[object]:
    lengths = ["--random-input-len", 8, "--random-output-len", 11]
    return ["--model", model, "--base-url", url, "--dataset-name", "random", *lengths]


@pytest.mark.slow
def test_the_clock_is_reported(model: Path, tmp_path: Path) -> None:
    with running_clock(ttft_ms=400, itl_ms=50) as url:
        flags = ["--num-prompts", 16, "--max-concurrency", 8, "--percentile-metrics", "ttft,tpot,itl,e2el"]
        result = result_of(tmp_path, *clock_flags(model, url), *flags, "--goodput", "ttft:4000", "tpot:500")
    # A busy machine delays most requests, but hardly all of them; none is early.
    tpots = [mean(gaps) for gaps in result["itls"]]
    assert min(result["ttfts"]) == pytest.approx(0.400, rel=0.1)
    assert min(tpots) == pytest.approx(0.050, rel=0.1)
    assert result["median_ttft_ms"] == pytest.approx(1000 * median(result["ttfts"]))
    assert result["median_tpot_ms"] == pytest.approx(1000 * median(tpots))
    assert result["median_e2el_ms"] > 0.95 * 900
    assert result["total_output_tokens"] == 16 * 11 and {len(gaps) for gaps in result["itls"]} == {10}
    assert result["request_goodput"] == result["request_throughput"]


@pytest.mark.slow
def test_a_sweep(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_clock(ttft_ms=20, itl_ms=5) as url:
        flags = ["--sweep", 4, 1, "--num-prompts", 8, "--save-result"]
        status = run(tmp_path, *clock_flags(model, url), *flags)
    if find_spec("matplotlib") is None:
        error = capsys.readouterr().err
        assert status == 1 and error.count("\n") == 1 and "atom-serve[bench]" in error
        return
    assert status == 0
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json", ".md", ".png"]
    rows = next(tmp_path.glob("*.md")).read_text().splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["1", "4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base-url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: Connection refused"),
        (["--profile"], "/start_profile answered 404"),
        (["--endpoint", "/v1/models"], "--backend vllm needs an --endpoint"),
        (["--tokenizer", "/nowhere/at/all"], "no tokenizer in /nowhere/at/all"),
        (["--dataset-name", "sharegpt"], "sharegpt needs --dataset-path"),
    ],
)
def test_errors_are_one_line(
    model: Path, tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_clock(ttft_ms=1, itl_ms=1) as url:
        assert run(tmp_path, *clock_flags(model, url), *flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
