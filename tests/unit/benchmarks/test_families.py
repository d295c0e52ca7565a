"""The benchmark of families: floors and ratios, and a family that fails among others."""

from pathlib import Path

import msgspec
import pytest

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks import families
from benchmarks.family_runs.family_run import FamilyLaunch, row_of
from benchmarks.family_runs.step_bytes import StepBytes
from benchmarks.ranks.decode_step_rank import Row


def test_a_floor_is_the_time_to_read_the_bytes() -> None:
    launch = FamilyLaunch("phi4", "", {}, [64], 1024, 64, read_gb_s=4000)
    row = row_of(launch, Row(64, 1.0, 1.1, 1.2, 0.3, 90, 22.5), 1056, StepBytes(3e9, 1e9), ["route"])
    assert (row.floor_ms, row.ratio, row.context) == (1.0, 1.2, 1056)
    words = families.line_of(row).split()
    assert words == ["phi4", "64", "1.200", "1.100", "1.000", "1.20", "22.5", "route"]


def test_a_family_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(launch: FamilyLaunch, limit_s: float) -> str:
        assert launch.options["cudagraph_capture_sizes"] == "[1, 64]" and launch.options["block_size"] == 32
        measured = [row_of(launch, Row(1, 1.0, 1.0, 1.0, 0.1, 40, 10.0), 1056, StepBytes(4e9, 0), [])]
        if launch.family == "phi3":
            return f"phi3: not finished within {limit_s:.0f} s"
        (Path(launch.directory) / "rows.json").write_bytes(msgspec.json.encode(measured))
        return ""

    monkeypatch.setattr(families, "_run", run)
    given = ["--families", "phi4", "phi3", "olmo3", "--block-size", "32", "--time-limit", "7"]
    rows, failures = families.measure_families(families._parser().parse_args(given))
    assert [row.family for row in rows] == ["phi4", "olmo3"] and failures == ["phi3: not finished within 7 s"]
    assert "phi3: not finished" in capsys.readouterr().out


def test_a_model_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="--families"):
        families.measure_families(families._parser().parse_args(["--model", "/x"]))
