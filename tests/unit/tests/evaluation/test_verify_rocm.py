"""The report of `make verify-rocm`, whatever its parts do."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.evaluation import verify_rocm
from tests.evaluation.verify_rocm import Options, parts, verify
from tests.helpers.verification import Part

TESTS = """
import os, pytest

def test_good(): pass
def test_bad(): assert 6 * 7 == 41, "the product of AITER"
@pytest.mark.skip(reason="no second GPU")
def test_none(): pass
def test_fault(): os.abort()
def test_after(): pass
"""


def test_no_part_stops_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    some = str(tmp_path / "test_some.py")
    options = Options("cpu", tmp_path / "report.md", work=tmp_path / "work")
    isolated = verify_rocm._pytest("tests: some", some, "--rootdir", str(tmp_path), "-c", "/dev/null")
    begun = time.monotonic()
    passed = verify(
        [
            Part("speaks", ("-c", "print('gfx942', '`' * 3)"), 100),
            Part("fails", ("-c", "import sys; sys.exit('no GPU')"), 100),
            Part("crashes", ("-c", "import os; os.abort()"), 100),
            Part("hangs", ("-c", "import time; print('begun', flush=True); time.sleep(300)"), 4),
            Part("hidden", ("-c", "import os; print(os.environ['PROBE'])"), 100, {"PROBE": "seen by it"}),
            isolated,
        ],
        options,
    )
    assert not passed and time.monotonic() - begun < 200
    report = options.output.read_text()
    for line in (
        "6 of 6 parts: 2 passed, 4 failed",
        "| speaks | ok |",
        "| fails | status 1 |",
        "| crashes | killed by SIGABRT |",
        "| hangs | did not end within 4 s |",
        "| tests: some | status 1, 2 passed, 2 failed, 1 skipped |",
        "gfx942 '''",
        "no GPU",
        "begun",
        "seen by it",
        "the product of AITER",
        "crashed while running",
        "Skipped: no second GPU",
    ):
        assert line in report, line
    assert "report: " in capsys.readouterr().out


def test_every_file_for_a_gpu_is_a_part() -> None:
    """But for those about NVIDIA's programmatic launch."""
    files = {path.stem.removeprefix("test_") for path in Path("tests/gpu").glob("test_*.py")}
    assert files - set(verify_rocm._GPU_TESTS) == {"pdl"}
    assert set(verify_rocm._GPU_TESTS) <= files


def test_parts_are_chosen_by_words(tmp_path: Path) -> None:
    options = Options("cuda", tmp_path / "report.md", ("environment", "without AITER"), tmp_path)
    environment, *benchmarks = parts(options)
    assert environment.name == "environment" and len(benchmarks) == 1 + len(verify_rocm._MODELS)
    hidden, _, _ = benchmarks[0].environment["PYTHONPATH"].partition(":")
    assert "raise ImportError" in (Path(hidden) / "aiter.py").read_text()
    options.only = ("no such part",)
    with pytest.raises(SystemExit, match="no part has a name with no such part"):
        parts(options)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_whole_run_on_a_cpu(tmp_path: Path) -> None:
    options = Options("cpu", tmp_path / "report.md", work=tmp_path)
    assert verify(parts(options), options), options.output.read_text()
    report = options.output.read_text()
    assert "rms_norm" in report and json.loads(report.partition("```text\n")[2].partition("\n```")[0])
    assert sys.version.split()[0] in report
