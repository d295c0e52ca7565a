"""Virtual environments are kept while they are whole, and made anew otherwise."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.source import ROOT
from tools import make_venv

DEADLINE_S = 240
SCRIPT = ROOT / "tools" / "make_venv.py"


def run(directory: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), str(directory), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_an_interrupted_one_is_made_anew_and_a_whole_one_is_kept(tmp_path: Path) -> None:
    directory = tmp_path / "venv"
    (directory / "bin").mkdir(parents=True)
    (directory / "pyvenv.cfg").touch()
    (directory / "bin" / "python").symlink_to(sys.executable)  # as far as a first run may have come
    done = run(directory)
    assert done.returncode == 0 and done.stdout == f"making {directory}, by {sys.executable}\n"
    assert run(directory, "--of-this-python").stdout == ""
    (pip,) = directory.glob("lib/python3*/site-packages/pip-*.dist-info")
    (pip / "RECORD").unlink()
    assert not make_venv.is_whole(str(directory))


@pytest.mark.parametrize(("flags", "makes"), [((), False), (("--of-this-python",), True)])
def test_another_interpreters_is_kept_unless_this_one_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], makes: bool
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(make_venv, "identity", lambda python: python)
    monkeypatch.setattr(make_venv, "is_whole", lambda directory: True)
    monkeypatch.setattr(make_venv.subprocess, "call", lambda command: calls.append(command))
    monkeypatch.setattr(sys, "argv", ["make_venv", str(tmp_path / "venv"), *flags])
    make_venv.main()
    assert bool(calls) == makes


def test_an_old_python_and_a_missing_module_are_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "version_info", (3, 10, 13, "final", 0))
        old = make_venv.why_not(str(tmp_path))
    assert "needs Python 3.11 or newer" in old and "is 3.10.13" in old and "PYTHON=python3.12" in old
    monkeypatch.setattr(make_venv, "find_spec", lambda name: None)
    lacking = make_venv.why_not(str(tmp_path))
    assert "lacks the module ensurepip" in lacking and "apt install python3." in lacking
    assert "\n" not in old + lacking


def test_an_interruption_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str]) -> int:
        raise KeyboardInterrupt

    directory = str(tmp_path / "venv")
    monkeypatch.setattr(make_venv.subprocess, "call", interrupted)
    monkeypatch.setattr(sys, "argv", ["make_venv", directory])
    with pytest.raises(SystemExit) as caught:
        make_venv.main()
    assert caught.value.code == f"interrupted: the next call makes {directory} anew"


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    done = run(tmp_path)
    assert done.returncode == 1 and (tmp_path / "thesis.txt").exists()
    assert done.stderr == f"error: {tmp_path} is no virtual environment: move it away\n"


def test_old_pythons_can_read_the_script() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
