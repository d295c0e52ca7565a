"""`atom doctor` on this machine."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)

DEADLINE_S = 150.0


def run(
    *args: str, prepare: Callable[[], None] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atom", *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | env,
        preexec_fn=prepare,
    )


def test_json_of_this_machine(tmp_path: Path) -> None:
    # A library that crashes ends neither the report nor the verdict.
    (tmp_path / "aiter.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("doctor", "--json", PYTHONPATH=path)
    assert done.returncode == 0 and done.stderr == "", done
    report = json.loads(done.stdout)
    assert report["can_serve"] is True and report["hub"] is None
    assert report["libraries"]["AITER"]["error"] == "the import crashed: killed by SIGABRT"
    assert "every other op: torch" in report["devices"]["ops"]["cpu"]
    assert report["host"]["cpu"]["cores"] >= 1 and report["host"]["cpu"]["available_bytes"] > 0
    versions = {each["name"]: each["version"] for each in report["host"]["packages"]}
    assert report["devices"]["torch"].startswith(versions["torch"])


def test_a_host_that_cannot_serve_has_status_1() -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    done = run("doctor", prepare=few_files)
    assert done.returncode == 1, done
    assert "only 200 files may be open: raise the hard limit" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("no model can be served")
    assert len(done.stdout.splitlines()) <= 30


def test_a_bad_command_line_has_status_2() -> None:
    for args in ((), ("docto",), ("serve", "MODEL"), ("doctor", "--server-port", "0"), ("doctor", "--jso")):
        done = run(*args)
        assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr
