"""The private directory of an engine, and what a killed one leaves."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.shared.utils.run_directory import RunDirectory


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-") as directory:  # short, as sockets need it
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def test_it_is_private_and_removed(parent: Path) -> None:
    directory = RunDirectory()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    (directory.path / "socket").touch()
    directory.close()
    directory.close()
    assert list(parent.iterdir()) == []


def test_those_of_living_engines_are_left_alone(parent: Path) -> None:
    first, second = RunDirectory(), RunDirectory()
    assert first.path.exists() and second.path.exists()
    first.close()
    assert second.path.exists()
    second.close()


def test_what_a_killed_engine_left_is_removed(parent: Path) -> None:
    code = (
        "import time; from atom.shared.utils.run_directory import RunDirectory; made = RunDirectory();"
        "(made.path / 'socket').touch(); print(made.path, flush=True); time.sleep(60)"
    )
    environment = os.environ | {"TMPDIR": str(parent), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        mine = RunDirectory()
        assert left.exists(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
    assert left.exists()
    mine.close()
    RunDirectory().close()
    assert not left.exists()


def test_what_only_looks_like_one_is_left_alone(tmp_path: Path, parent: Path) -> None:
    (tmp_path / "precious").touch()
    (parent / "atom-run-link").symlink_to(tmp_path)
    (parent / "atom-run-file").touch()
    RunDirectory().close()
    assert (tmp_path / "precious").exists()
    assert {path.name for path in parent.iterdir()} == {"atom-run-link", "atom-run-file"}


def test_a_path_too_long_for_sockets_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = parent / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(OSError, match="set TMPDIR to a shorter one"):
        RunDirectory()
    assert list(long.iterdir()) == []
