"""Libraries that are installed and cannot be imported cost a warning at start, never the process."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from atom.shared.messages.doctor import Library
from atom.shared.utils import envs, optional_library
from atom.shared.utils.file_lock import exclusive
from atom.shared.utils.optional_library import AITER, MORI
from atom_ops import aiter_impl, backend, native_impl
from parallel.expert.mori import mori_problem
from tests.helpers.source import ROOT

GPU = torch.device("cuda", 0)
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package with that source and version on the paths of this process and its children.

    The cache is empty: compiling the kernels in C++ for it may take longer than a test.
    """

    def put(module: str, source: str, version: str = "") -> None:
        (tmp_path / f"{module}.py").write_text(source)
        if version:
            described = tmp_path / f"amd_{module}-{version}.dist-info"
            described.mkdir()
            (described / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: amd-{module}\nVersion: {version}\n"
            )

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    optional_library._KNOWN.clear()
    yield put
    optional_library._KNOWN.clear()


@pytest.fixture
def mi300(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_impl, "architecture", lambda device: "gfx942")
    monkeypatch.setattr(torch.version, "hip", "7.0")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise OSError('libamdhip64.so.7: no such file')", "OSError: libamdhip64.so.7: no such file"),
        ("import os\nos.abort()", "the import ended its process with status -6"),
    ],
)
@pytest.mark.usefixtures("mi300")
def test_what_cannot_be_imported_is_not_used(source: str, found: str, install: Install) -> None:
    install("aiter", source, "0.1.9")
    assert not aiter_impl.runs_on(GPU)
    (line,) = backend.warnings(GPU)
    assert line.startswith("ops run without AITER: amd-aiter ")
    assert found in line and "hipcc" in line
    assert "aiter" not in sys.modules


@pytest.mark.usefixtures("mi300")
def test_a_version_that_is_too_old_is_named(install: Install) -> None:
    install("aiter", "", "0.1.5.post4")
    assert not aiter_impl.runs_on(GPU)
    assert backend.warnings(GPU) == [
        "ops run without AITER: amd-aiter 0.1.5.post4 is too old: pip install 'amd-aiter>=0.1.7'"
    ]


@pytest.mark.usefixtures("mi300")
def test_ranks_import_one_after_another(install: Install, tmp_path: Path) -> None:
    """Imports of several ranks at once would write the same files."""
    place = tmp_path / "alone"
    install("aiter", f"import os, time\nos.mkdir({str(place)!r})\ntime.sleep(0.2)\nos.rmdir({str(place)!r})")
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(optional_library._tried, [AITER] * 3))
    assert [each.error for each in found] == [""] * 3


def test_an_import_that_hangs_is_not_waited_for(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("aiter", "import time\ntime.sleep(100)")
    monkeypatch.setattr(optional_library, "DEADLINE_S", 0.5)
    problem = optional_library.problem(AITER)
    assert problem and "the import did not end within 0 s; a lock_* file" in problem
    with exclusive(Path(envs.ATOM_CACHE_DIR) / "import-aiter.lock", 1, lambda: None):
        assert "did not end" in optional_library._tried(AITER).error


def test_a_result_that_is_known_is_not_tried_again(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("aiter", "import os\nos.abort()", "0.1.9")
    monkeypatch.setattr(optional_library, "_tried", lambda launch: pytest.fail("tried again"))
    optional_library.remember(AITER, Library("0.1.9", "OSError: no libhsa.so"))
    problem = optional_library.problem(AITER)
    assert problem and problem.startswith("amd-aiter 0.1.9 cannot be imported (OSError: no libhsa.so)")
    optional_library.remember(AITER, Library("0.1.9"))
    assert optional_library.problem(AITER) is None


def test_a_cache_that_cannot_be_written_locks_nothing(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    install("aiter", "")
    assert optional_library._tried(AITER).error == ""


@pytest.mark.usefixtures("mi300")
def test_mori_that_is_asked_for_and_broken_is_refused(install: Install) -> None:
    install("mori", "raise ImportError('librocm_smi64.so')", "1.2.4")
    problem = mori_problem(GPU)
    assert problem and problem.startswith("amd-mori 1.2.4 cannot be imported (ImportError: librocm_smi64.so)")


@pytest.mark.usefixtures("mi300")
def test_what_can_be_imported_is_used(install: Install) -> None:
    install("aiter", "", "0.1.7.post2")
    install("mori", "", "1.2.4")
    assert aiter_impl.runs_on(GPU) and not backend.warnings(GPU) and mori_problem(GPU) is None


def test_another_amd_gpu_has_no_aiter(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("aiter", "raise AssertionError")
    monkeypatch.setattr(aiter_impl, "architecture", lambda device: "gfx1100")
    assert not aiter_impl.runs_on(GPU)
    assert "no kernels for gfx1100" in backend.warnings(GPU)[0]


def test_nothing_is_tried_on_other_devices(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the libraries are installed: the import would fail, and takes seconds."""

    def unwanted(*args: object, **kwargs: object) -> None:
        raise AssertionError("a trial import on a device that is not AMD's")

    for launch in (AITER, MORI):
        install(launch.module, "raise AssertionError")
    monkeypatch.setattr(optional_library, "spawn", unwanted)
    monkeypatch.setattr(native_impl, "problem", lambda device: None)
    before = set(sys.modules)
    for device in (torch.device("cpu"), GPU):
        assert not aiter_impl.runs_on(device) and not backend.warnings(device)
        assert mori_problem(device) == "MORI needs an AMD GPU and torch for ROCm"
    resolved = backend.resolve(torch.device("cpu"))
    assert not any(name.startswith(("aiter", "mori")) for order in resolved.values() for name in order)
    assert not (set(sys.modules) - before) & {"aiter", "mori"}


def test_without_an_amd_gpu_none_is_imported(install: Install) -> None:
    """In a whole worker process, even though all are installed; they would end it."""
    for module in ("aiter", "mori", "amdsmi"):
        install(module, "import os\nos._exit(7)")
    lines = (
        "import sys, torch, workers.main, parallel.expert.choose",
        "from atom_ops import backend",
        "backend.resolve(torch.device('cpu'))",
        "print(sorted({'aiter', 'mori', 'amdsmi'} & set(sys.modules)))",
    )
    done = subprocess.run(
        [sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, timeout=100,
        env=os.environ
        | {"CXX": "no-compiler", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
