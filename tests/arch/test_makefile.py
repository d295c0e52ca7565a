"""What make's targets run, with stubs for what takes long."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.source import ROOT

DEADLINE_S = 60
FILES = ("Makefile", "tests/external.mk", "benchmarks/bench.mk", "pyproject.toml", "constraints.txt")

# Each logs its arguments. Tests of modules fail.
STUB = """#!/bin/bash
echo "{name} $*" >> {log}
case "$*" in
    "-m tools.run_phases"*) exec {python} "$@" ;;
    *tests/models\\ tests/golden*) echo "1 failed, 2 passed in 3.00s"; exit 1 ;;
    *pytest*) echo "5 passed in 1.00s" ;;
esac
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The file in which stubs of an environment of `make` at tmp_path/venv log their arguments."""
    path = tmp_path / "log"
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "atom-launch", "given"):
        (programs / name).write_text(STUB.format(name=name, log=path, python=sys.executable))
        (programs / name).chmod(0o755)
    for stamp in (".made", ".installed", ".model"):
        (programs.parent / stamp).touch()
    path.touch()
    return path


# With these, make takes itself for part of the run that started this test.
_MAKES_OWN = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MODEL", "PYTHON")


def make(tmp_path: Path, *arguments: str, at: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if name not in _MAKES_OWN}
    return subprocess.run(
        ["make", f"VENV={tmp_path / 'venv'}", *arguments],
        cwd=at,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**kept, "PYTHONPATH": str(ROOT)},
    )


def test_make_test_runs_every_phase_and_fails_if_one_does(tmp_path: Path, log: Path) -> None:
    done = make(tmp_path, "test", "ARGS=-k scheduler", "ISA_PHASE=test-isa-all")
    assert done.returncode == 2
    summary = done.stdout.partition("== summary\n")[2].splitlines()
    assert [line.split()[:2] for line in summary] == [
        ["test-modules", "failed"],
        ["test-processes", "passed"],
        ["test-isa-all", "passed"],
        ["test-kernels-short", "passed"],
    ]
    runs = [line for line in log.read_text().splitlines() if "-m pytest" in line]
    assert ["-k scheduler" in line for line in runs] == [True, True, False, False]
    assert "tests/multiprocess tests/e2e" in runs[1] and "triton and not float16" in runs[3]
    # The first call of an environment, and of each instruction set, compiles the kernels.
    assert log.read_text().count("native_impl.problem") == 2


def test_a_smaller_instruction_set_is_tested_where_the_cpu_has_a_larger_one(
    tmp_path: Path, log: Path
) -> None:
    make(tmp_path, "test")
    info = Path("/proc/cpuinfo")
    larger = info.exists() and "avx512f" in info.read_text()
    assert ("tests/golden tests/models/test_worker.py" in log.read_text()) == larger


def test_make_serve_serves_a_given_model_and_creates_no_file(tmp_path: Path, log: Path) -> None:
    model = tmp_path / "some model.gguf"
    make(tmp_path, "serve", f"MODEL={model}", "PORT=81").check_returncode()
    assert log.read_text() == f"atom-launch --model {model} --host 127.0.0.1 --server-port 81\n"
    assert not model.exists()
    make(tmp_path, "serve").check_returncode()
    assert "--served-model-name smollm2-135m-instruct" in log.read_text()


def test_a_given_python_is_obeyed_later_too(tmp_path: Path, log: Path) -> None:
    given = tmp_path / "venv" / "bin" / "given"
    asked = f"given tools/make_venv.py {tmp_path / 'venv'} --of-this-python\n"
    make(tmp_path, "install", f"PYTHON={given}").check_returncode()
    assert log.read_text() == asked, "the environment stays: nothing is installed"
    make(tmp_path, "install").check_returncode()
    assert log.read_text() == asked


def test_an_interrupted_install_is_looked_at_again(tmp_path: Path, log: Path) -> None:
    (tmp_path / "venv" / ".installed").unlink()
    make(tmp_path, "install", f"PYTHON={tmp_path / 'venv' / 'bin' / 'given'}").check_returncode()
    first, second, third, *_ = log.read_text().splitlines()
    assert "make_venv.py" in first and "make_venv.py" in second and "pip" in third


def test_a_missing_python_is_said_in_one_line(tmp_path: Path) -> None:
    done = make(tmp_path, "install", "PYTHON=python3.99")
    assert done.returncode == 2
    first = done.stdout.splitlines()[0]
    assert first.startswith("error: there is no python3.99: install Python 3.11 or newer, or name one")


def test_make_clean_removes_all_that_git_ignores(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    sources = make(tmp_path, "-pn", "help", at=tmp_path).stdout
    (line,) = (line for line in sources.splitlines() if line.startswith("SOURCES := "))
    for folder in line.split()[2:]:
        (tmp_path / folder).mkdir(exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    for pattern in (ROOT / ".gitignore").read_text().split():
        made = tmp_path / ("atom" if pattern == "__pycache__/" else "") / pattern.replace("*", "some")
        if pattern.endswith("/"):
            made.mkdir()
        else:
            made.touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, timeout=DEADLINE_S, check=True)
    assert sorted(tmp_path.rglob("*")) == before
