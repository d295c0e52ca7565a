"""How the kernels in C++ are compiled, kept and loaded, with a small source in their place."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from atom.shared.utils import envs
from atom_ops import backend, native_impl
from atom_ops.native_impl import build

CPU = torch.device("cpu")

# What is loaded from the kernels: to compile those takes ten seconds even unoptimised. Weak, since the
# source is compiled for each dtype.
SOURCE = """
#define KERNEL extern "C" __attribute__((weak))
KERNEL long atom_lanes() { return 8; }
KERNEL long atom_has_tiles() { return 0; }
KERNEL void atom_run(void *, long) {}
"""

pytestmark = pytest.mark.skipif(not native_impl.runs_on(CPU), reason="needs a C++ compiler")


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
@pytest.mark.parametrize("dtype", build.DTYPES)
@pytest.mark.parametrize("architecture", ["x86-64", "x86-64-v3", "cooperlake", "sapphirerapids"])
def test_clang_accepts_the_kernels(architecture: str, dtype: str) -> None:
    flags = ["-std=c++17", f"-march={architecture}", "-fopenmp", f"-DATOM_DTYPE={dtype}", "-Wall", "-Werror"]
    source = Path(native_impl.__file__).with_name("kernels.cpp")
    subprocess.run(["clang++", *flags, "-fsyntax-only", str(source)], check=True, timeout=60)


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    yield
    backend.resolve(CPU)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def built_here(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the libraries of a test."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(build, "_SOURCE", source)
    monkeypatch.setattr(build, "_HEADERS", ())
    monkeypatch.setattr(envs, "ATOM_CACHE_DIR", str(cache), raising=False)
    build._library.cache_clear()
    yield cache / "native"
    build._library.cache_clear()


def test_a_library_is_built_once_and_again_if_it_is_broken(
    built_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built() -> list[Path]:
        build._library.cache_clear()
        build.library()
        return sorted(path for path in built_here.iterdir() if path.suffix != ".lock")

    library, digest = sorted(built(), key=lambda path: path.suffix, reverse=True)
    assert (library.suffix, digest.suffix) == (".so", ".sha256")
    part = library.read_bytes()[:1000]
    library.unlink()  # it is mapped
    library.write_bytes(part)
    assert built() == sorted([library, digest]) and library.stat().st_size > len(part)
    monkeypatch.setattr(build, "_built", lambda *args: pytest.fail("it is built"))
    assert built() == sorted([library, digest])


COMPILER = """#!/bin/sh
test "$1" = --version || echo called >> {log}
exec {compiler} "$@"
"""
BUILD = """
import pathlib, sys
from atom_ops.native_impl import build
build._SOURCE, build._HEADERS = pathlib.Path(sys.argv[1]), ()
build.library()
"""


def test_processes_that_need_it_at_the_same_time_build_it_once(tmp_path: Path, source: Path) -> None:
    """And what a build that was killed has left is removed."""
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=log, compiler=build._compiler()[0]))
    compiler.chmod(0o755)
    environment = os.environ | {"ATOM_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(compiler)}
    command = [sys.executable, "-c", BUILD, str(source)]
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    assert len(log.read_text().split()) == 3, "two files are compiled, and linked"
    (library,) = (tmp_path / "cache" / "native").glob("*.so")
    library.unlink()
    left = library.with_name(f"{library.stem}-left")
    left.mkdir()
    subprocess.run(command, env=environment, timeout=100, check=True)
    assert library.exists() and not left.exists()


def test_another_compiler_or_other_arguments_make_another_library(
    built_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (compiler, *_) = build._compiler()
    for arguments in ("", "-DOTHER"):
        monkeypatch.setenv("CXX", f"{compiler} {arguments}")
        build._library.cache_clear()
        build.library()
    assert len(list(built_here.glob("*.so"))) == 2


def failing(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        (lambda folder: str(folder / "absent"), r"no C\+\+ compiler .*absent.*: install one"),
        (
            lambda folder: failing(folder / "broken", "echo 'x.cpp:1: error: no OpenMP' >&2; exit 1"),
            "no OpenMP",
        ),
        (lambda folder: failing(folder / "slow", 'test "$1" = --version || exec sleep 30'), "within 3 s"),
        (
            lambda folder: failing(
                folder / "text",
                'test "$1" = --version || for last; do :; done; echo no library > "${last:-/dev/null}"',
            ),
            "cannot load",
        ),
    ],
)
@pytest.mark.usefixtures("built_here")
def test_what_cannot_be_built_runs_on_torch_and_is_said(
    compiler: Callable[[Path], str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path))
    monkeypatch.setattr(build, "_DEADLINE_S", 3.0)
    with pytest.raises(build.BuildError, match=message):
        build.library()
    monkeypatch.setattr(build, "_opened", lambda: pytest.fail("it is tried again"))
    assert "native" not in backend.resolve(CPU)["rms_norm"]
    (line,) = backend.warnings(CPU)
    assert line.startswith("ops run without kernels in C++: ")


def test_a_full_disk_is_no_compiler_that_fails(
    built_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "echo 'kernels.cpp:300: fatal error: error writing to x.s: No space left on device' >&2; exit 1"
    monkeypatch.setenv("CXX", failing(tmp_path / "compiler", text))
    with pytest.raises(OSError, match="cannot be compiled: .*No space left on device"):
        build.library()


def test_a_library_that_another_user_can_have_written_is_not_loaded(
    built_here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its digest next to it proves nothing: who can write one can write both."""
    build.library()
    (library,) = built_here.glob("*.so")
    library.unlink()  # it is mapped
    library.write_bytes(b"planted")
    library.with_suffix(".sha256").write_text(build._digest(library))
    built_here.chmod(0o777)
    build._library.cache_clear()
    build.library()
    assert library.read_bytes() == b"planted"
    assert f"{built_here} can be written by every user" in caplog.text


def test_a_directory_that_cannot_be_written_is_not_needed(built_here: Path) -> None:
    built_here.parent.mkdir()
    built_here.write_text("a file in its place")
    build.library()
    assert list(built_here.parent.iterdir()) == [built_here]
