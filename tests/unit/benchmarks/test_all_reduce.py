"""The benchmark of the fused all-reduce and norm, between two processes on the CPU."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import all_reduce


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["all_reduce", "--device", "cpu", *flags])
    all_reduce.main()


def test_rows_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    sizes = ("--tokens", "1", "5", "--width", "24", "--calls", "2", "--rounds", "3")
    run(monkeypatch, *sizes, "--output-json", str(path))
    found = json.loads(path.read_text())
    facts = [found[name] for name in ("benchmark", "ranks", "dtype", "width")]
    assert facts == ["all_reduce", 2, "float32", 24]
    assert [row["tokens"] for row in found["rows"]] == [1, 5]
    assert all(row["two_calls_us"] > 0 and row["communicator_us"] > 0 for row in found["rows"])
    assert not any(row["one_kernel"] for row in found["rows"])
    assert capsys.readouterr().out.startswith("2 ranks (cpu), float32, width 24\n")


def test_one_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="error: an all-reduce is between 2 ranks or more, not 1"):
        run(monkeypatch, "--ranks", "1")
