"""`atom-launch --plan`: its figures are those of a real start, its errors are one line."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.shared.utils.exit_status import ExitStatus
from tests.helpers.servers.random_server import ARGS, write_checkpoint
from tests.helpers.servers.server import running_server

pytestmark = pytest.mark.timeout(400)

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plan") / "model")


@pytest.fixture(autouse=True)
def own_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert [name for name in os.listdir(directory) if name.startswith("atom-")] == []


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atom.launch", *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | env,
    )


def planned(*args: str) -> dict[str, Any]:
    done = run("--plan", "--json", *args)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_real_start_has_the_planned_cache(model: Path, size: int) -> None:
    args = (*ARGS, "--model", str(model), "-tp", str(size), "--kv-cache-memory-bytes", str(3 << 20))
    plan = planned(*args)
    with running_server(*args) as server:
        banner = re.search(
            r"KV cache +([\d,]+) tokens \(float32\), at most ([\d,]+) a request", server.text()
        )
        weights = re.findall(r"weights on rank \d: .*", server.text())
        assert server.terminate() == 0
    assert banner is not None and len(weights) == size
    shown = [int(text.replace(",", "")) for text in banner.groups()]
    assert shown == [plan["layout"]["kv_tokens"], plan["layout"]["max_model_len"]]
    for rank, line in zip(plan["ranks"], sorted(weights), strict=True):
        mib = sum(map(float, re.findall(r"\(([\d.]+) MiB\)", line)))
        assert mib == pytest.approx(rank["weight_bytes"] / (1 << 20), abs=0.11)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_leaves_nothing(model: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "atom.launch", "--plan", "--model", str(model)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as plan:
        while not list(Path(os.environ["TMPDIR"]).glob("atom-run-*/prepare")):
            assert plan.poll() is None
            time.sleep(0.02)
        plan.send_signal(number)
        assert plan.communicate(timeout=DEADLINE_S) == (None, "")
    assert plan.returncode == 128 + number


def test_a_model_that_does_not_fit_has_status_4(model: Path) -> None:
    done = run("--plan", "1x0.001", "--model", str(model))
    assert done.returncode == ExitStatus.RESOURCES
    assert "problem   the weights take" in done.stdout and "more GPUs, or larger ones" in done.stdout
    assert len(done.stdout.splitlines()) <= 24 and "Traceback" not in done.stderr


def test_errors_are_one_line(model: Path, tmp_path: Path) -> None:
    unknown = write_checkpoint(tmp_path / "unknown", architectures=["NoSuchModel"], model_type="none")
    lacking = write_checkpoint(tmp_path / "lacking", hidden_size=None)
    cases = (
        (("--model", str(tmp_path / "nothing")), ExitStatus.MODEL, "no such path"),
        (("--model", "someone/nothing"), ExitStatus.RESOURCES, "HF_HUB_OFFLINE"),
        (("--model", str(unknown)), ExitStatus.MODEL, "NoSuchModel"),
        (("--model", str(lacking)), ExitStatus.MODEL, "hidden_size"),
        (("--model", str(model), "-tp", "7"), ExitStatus.USAGE, "6 query and 2 key/value heads"),
        (("--model", str(model), "--max-model-len", "99999"), ExitStatus.USAGE, "65536"),
    )
    for args, status, text in cases:
        done = run("--plan", *args, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
        lines = done.stderr.splitlines()
        assert done.returncode == status, (args, done)
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:], lines
        assert text in lines[-1] and done.stdout == ""


def test_json_alone_is_refused(model: Path) -> None:
    done = run("--json", "--model", str(model))
    assert (done.returncode, done.stderr) == (ExitStatus.USAGE, "error: --json needs --plan\n")


def test_a_cache_beyond_memory_is_refused_by_plan_and_by_a_start(model: Path) -> None:
    args = (*ARGS, "--model", str(model), "--kv-cache-memory-bytes", "900T")
    plan, start = run("--plan", *args), run("--host", "127.0.0.1", "--server-port", "0", *args)
    assert plan.returncode == start.returncode == ExitStatus.RESOURCES
    for text in (plan.stdout, start.stderr.splitlines()[-1]):
        assert "the KV cache takes 921,600.0 GiB on rank 0, and the weights leave" in text
        assert "lower --kv-cache-memory-bytes" in text
