"""Processes that are not sent what to do."""

import os
import subprocess
import sys

import pytest

from atom.shared.utils.process import module_environment


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
