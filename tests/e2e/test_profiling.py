"""Profiles of real engines while they work: no request is lost, and the traces add up."""

import gzip
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from atom import LLMEngine, SamplingParams
from tests.helpers.servers.random_server import ARGS, MODEL_NAME, write_checkpoint
from tests.helpers.servers.server import Server, running_server
from tests.helpers.source import ROOT
from tools import parse_trace

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

DEADLINE_S = 200
CLIENTS, TOKENS = 6, 80
LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("random") / "a model"))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(model: str, traces: Path) -> Iterator[Server]:
    profiling = ("--torch-profiler-dir", str(traces), "--mark-trace")
    with running_server("--model", model, *ARGS, "-tp", "2", *profiling) as server:
        yield server


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        decoded: dict[str, Any] = json.load(answer)
        return decoded


def complete(server: Server, number: int) -> str:
    body = {"model": MODEL_NAME, "prompt": [5 + number] * 30, "max_tokens": TOKENS, "temperature": 0}
    answer = post(server, "/v1/completions", {**body, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == TOKENS
    text: str = answer["choices"][0]["text"]
    return text


def all_clients(server: Server, pool: ThreadPoolExecutor) -> Any:
    return pool.map(lambda number: complete(server, number), range(CLIENTS))


def test_profiling_on_and_off_under_load_loses_no_request(server: Server, traces: Path) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        quiet = list(all_clients(server, pool))
        loads, shown = [], []
        for _ in range(3):
            loads.append(all_clients(server, pool))
            assert post(server, "/start_profile", {"model": MODEL_NAME})["status"] == "success"
            time.sleep(0.1)
            shown.append(post(server, "/stop_profile", {})["traces"])
        assert [list(load) for load in loads] == [quiet] * 3
    assert any(ranks[0]["steps"] for ranks in shown), "nothing ran while it was recorded"
    written = sorted(traces.glob("rank_*/*"))
    assert written == sorted(Path(one["trace_dir"], one["trace"]) for ranks in shown for one in ranks)
    assert [path.parent.name for path in written] == ["rank_0"] * 3 + ["rank_1"] * 3
    assert all(path.name.startswith("a_model_ts_") and path.name.endswith(".json.gz") for path in written)
    # Both ranks run the same steps, and are told in the same place of their order.
    assert all(ranks[0]["steps"] == ranks[1]["steps"] for ranks in shown)


def operators_us(path: Path, kind: str) -> float:
    """Time in operators within the first step of a kind: the union of their intervals."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [one for one in events if one.get("cat") == "user_annotation" and one["name"].startswith(kind)]
    step = min(steps, key=lambda one: one["ts"])
    begin, end = step["ts"], step["ts"] + step["dur"]
    mine = [one for one in events if one.get("cat") == "cpu_op" and one["tid"] == step["tid"]]
    total, reached = 0.0, begin
    for one in sorted(mine, key=lambda one: one["ts"]):
        if begin <= one["ts"] < end:
            total += max(0.0, one["ts"] + one["dur"] - max(reached, one["ts"]))
            reached = max(reached, one["ts"] + one["dur"])
    return total


def test_the_tables_of_a_served_model_add_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post(server, "/start_profile", {})
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(all_clients(server, pool))
    trace = post(server, "/stop_profile", {})["traces"][0]
    path = Path(trace["trace_dir"], trace["trace"])
    monkeypatch.chdir(tmp_path)
    for kind in ("prefill", "decode"):
        layers = 0.0
        for layer in range(LAYERS):
            monkeypatch.setattr(sys, "argv", ["parse_trace.py", str(path), "--layer", str(layer)])
            parse_trace.main()
            book = openpyxl.load_workbook(f"{kind}_breakdown.xlsx")
            rows = list(book[kind].iter_rows(min_row=2, values_only=True))
            assert {row[0] for row in rows} >= {"self_attn.qkv_proj", "mlp.down_proj", "TOTAL"}
            assert sum(row[2] for row in rows[:-1]) == pytest.approx(rows[-1][2], rel=1e-4)
            layers += rows[-1][2]
        *kernels, total = book["kernel_summary"].iter_rows(min_row=2, values_only=True)
        assert sum(row[2] for row in kernels) == pytest.approx(total[2], rel=1e-4)
        assert total[2] == pytest.approx(operators_us(path, kind), rel=0.01)
        assert 0.3 * total[2] < layers < total[2]


def test_the_library_keeps_what_comes_while_it_waits_for_the_profiler(model: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [[5 + number] * 30 for number in range(4)]
    options: dict[str, Any] = {"load_dummy": True, "dtype": "float32", "device": "cpu", "cpu_threads": 1}
    options |= {"kv_cache_memory_bytes": 1 << 27, "torch_profiler_dir": str(tmp_path)}
    with LLMEngine(model=model, **options) as engine:
        quiet = [output["token_ids"] for output in engine.generate(prompts, params)]
        with pytest.raises(RuntimeError, match="profiling is not on"):
            engine.stop_profile()
        ids = engine.add_request(prompts, params)
        done = {}
        paths = []
        while not engine.is_finished():
            if len(paths) < 3:
                engine.start_profile()
                paths += engine.stop_profile()
            done |= {sequence.request_id: sequence.token_ids for sequence in engine.step()}
        engine.start_profile()
    assert [done[request_id] for request_id in ids] == quiet
    assert len(set(paths)) == 3 and all(Path(path).stat().st_size for path in paths)
    assert len(list((tmp_path / "rank_0").iterdir())) == 4, "what was recorded at the end is written too"


def test_profile_offline(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atom.examples.profile_offline", "--model", model, *ARGS[:5]]
    sizes = [
        "--bs",
        "2",
        "--input-length",
        "16",
        "--output-length",
        "4",
        "--kv-cache-memory-bytes",
        "100000000",
    ]
    done = subprocess.run(
        [*command, *sizes, "--random-input"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "2 prompts, 32 tokens in, 8 out" in done.stdout
    (path,) = (tmp_path / "profiler_traces" / "rank_0").iterdir()
    assert str(path) in done.stdout
