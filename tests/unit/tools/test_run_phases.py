"""All phases run, and one summary says what became of each."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.source import ROOT

MAKEFILE = """
bad:
	@echo 'F..'; echo 'FAILED tests/test_a.py::test_b - assert 1 == 2'
	@echo '1 failed, 2 passed in 3.21s'; exit 1
broken:
	@echo 'no compiler'; exit 3
empty:
	@echo '40 deselected in 0.11s'; exit 5
good: empty-first
	@printf '\\033[32m\\033[1m7 passed\\033[0m, 1 skipped in 61.10s (0:01:01)\\n'
empty-first:
waits:
	@echo 'it waits'; exec sleep 60
"""


def phases(directory: Path, *targets: str) -> "subprocess.Popen[str]":
    (directory / "Makefile").write_text(MAKEFILE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.Popen(
        [sys.executable, "-m", "tools.run_phases", *targets],
        stdout=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**environment, "PYTHONPATH": str(ROOT)},
        process_group=0,
        # A shell ignores SIGINT for what it runs in the background, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_phase_that_fails_stops_none_and_the_exit_status_is_of_all(tmp_path: Path) -> None:
    running = phases(tmp_path, "bad", "empty", "broken", "good")
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    said, _, summary = output.partition("\n== summary\n")
    assert "no compiler" in said
    summary = re.sub(r" \d+ s ", " 0 s ", summary)
    assert [line.split(maxsplit=4) for line in summary.splitlines()[:1]] == [
        ["bad", "failed", "0", "s", "1 failed, 2 passed"]
    ]
    assert [line.split("  ")[0].strip() for line in summary.splitlines()[:4]] == [
        *("bad", "empty", "broken", "good")
    ]
    for line in (
        "no tests         0 s  40 deselected",
        "exit status 2",
        "passed           0 s  7 passed, 1 skipped",
    ):
        assert line in summary
    assert summary.endswith("bad: FAILED tests/test_a.py::test_b - assert 1 == 2\n")


def test_phases_that_pass_and_one_without_selected_tests_are_a_success(tmp_path: Path) -> None:
    running = phases(tmp_path, "empty", "good")
    running.communicate(timeout=60)
    assert running.returncode == 0


def test_ctrl_c_ends_the_running_phase_and_runs_no_other(tmp_path: Path) -> None:
    running = phases(tmp_path, "waits", "good")
    assert running.stdout is not None
    while running.stdout.readline() != "it waits\n":
        pass
    begun = time.monotonic()
    try:
        os.killpg(running.pid, signal.SIGINT)
        output, _ = running.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 130 and time.monotonic() - begun < 30
    assert "waits  interrupted" in output
    assert "good   not run" in output and "61.10s" not in output
