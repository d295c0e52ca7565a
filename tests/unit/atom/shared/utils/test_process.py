"""Processes that are not sent what to do, and the last line of one."""

import os
import subprocess
import sys
import time

import pytest

from atom.shared.utils.process import last_line, module_environment


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"_ATOM_PARENT_PID": str(os.getpid())}, ""),  # its parent is stopped in the middle of its start
        ({}, "ValueError: this module is started by atom-launch, not by hand\n"),
    ],
)
def test_without_a_launch_message(variables: dict[str, str], error: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine_core.process"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env=module_environment() | variables,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines(keepends=True)[-1:] == ([error] if error else [])


def printing(code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_the_last_line_of_a_child() -> None:
    turns: list[float] = []
    child = printing("import time; print('first', flush=True); time.sleep(0.5); print('last')")
    assert last_line(child, time.monotonic() + 60, lambda: turns.append(time.monotonic())) == b"last"
    assert len(turns) >= 5


def test_a_child_without_a_last_line_in_time_is_killed() -> None:
    child = printing("import time; time.sleep(600)")
    with pytest.raises(TimeoutError):
        last_line(child, time.monotonic() + 0.3)
    assert child.returncode == -9


def test_a_child_that_has_ended_in_time_may_be_asked_later() -> None:
    child = printing("print('last')")
    child.wait(60)
    assert last_line(child, time.monotonic() - 1) == b"last"


def test_a_wait_that_is_given_up_ends_the_child() -> None:
    def give_up() -> None:
        raise SystemExit(5)

    child = printing("import time; time.sleep(600)")
    with pytest.raises(SystemExit):
        last_line(child, time.monotonic() + 60, give_up)
    assert child.returncode == -9
