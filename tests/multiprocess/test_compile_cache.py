"""The compile cache on disk, with Inductor and a C++ compiler: reused, shared and damaged."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints.tiny_models import save_tiny, tiny

_DEADLINE_S = 300.0
"""Deadline of one process; the test starts six, most of which compile."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * _DEADLINE_S)]

Start = Callable[[Path, int, Path], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that computes tokens with a model at a level; the test's end kills it."""
    with contextlib.ExitStack() as started:

        def start(model: Path, level: int, cache: Path) -> subprocess.Popen[str]:
            environment = os.environ | {"ATOM_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.helpers.engine.compile_level", str(model), str(level)]
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start


def result(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """What it printed, and its log."""
    printed, log = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 0, log
    return json.loads(printed), log


def test_reused_shared_and_damaged(start: Start, tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    save_tiny(tiny("llama-gqa"), model)
    wanted = result(start(model, 0, cache))[0]["tokens"]
    both = [start(model, 2, cache) for _ in range(2)]
    found = [result(each)[0] for each in both]
    assert [each["tokens"] for each in found] == [wanted] * 2
    assert any(each["misses"] for each in found), "nothing was compiled"
    again, _ = result(start(model, 2, cache))
    assert again["tokens"] == wanted
    assert again["hits"] and not again["misses"]
    damaged = [path for path in cache.rglob("*") if path.is_file()]
    for path in damaged:
        path.write_bytes(b"damaged")
    repaired, log = result(start(model, 2, cache))
    assert repaired["tokens"] == wanted, log
    healthy, _ = result(start(model, 2, cache))
    assert healthy["tokens"] == wanted
    assert healthy["hits"] and not healthy["misses"]
