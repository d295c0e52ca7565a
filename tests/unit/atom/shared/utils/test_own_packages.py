"""Started in a directory that has packages with our names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.install_check import PACKAGES
from tests.helpers.source import ROOT

NAMES = sorted({*PACKAGES} - {"atom"})
DEADLINE_S = 60.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a package of the user')")
    return tmp_path


def run(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Python in that directory; atom is found as if it were installed."""
    return subprocess.run(
        [sys.executable, *args],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    "args",
    [
        ("-m", "atom.launch", "--version"),
        ("-m", "atom.entrypoints.openai_server", "--version"),
        ("-m", "atom", "doctor", "--help"),
        ("-m", "atom.benchmarks.benchmark_serving", "--help"),
        ("-c", "from atom.launch import main; main()", "--version"),
        ("-c", "from atom import *; import frontend.text, engine_core.core, parallel, workers, atom_ops"),
    ],
    ids=" ".join,
)
def test_ours_are_found(directory: Path, args: tuple[str, ...]) -> None:
    done = run(directory, *args)
    assert (done.returncode, done.stderr) == (0, "")


def test_child_processes_find_ours(directory: Path) -> None:
    done = run(directory, "-m", "atom.launch", "nothing/here/", "--host", "127.0.0.1", "--server-port", "0")
    assert done.returncode == ExitStatus.MODEL
    assert (
        done.stderr.startswith("error: --model nothing/here/: no such path") and done.stderr.count("\n") == 1
    )


def test_a_package_that_was_imported_before_is_named(directory: Path) -> None:
    (directory / "workers" / "__init__.py").write_text("")
    done = run(directory, "-c", "import workers, atom; atom.SamplingParams; atom.LLMEngine")
    assert done.returncode == 1
    assert f"ImportError: the name 'workers' is taken: {directory / 'workers'} was imported" in done.stderr
