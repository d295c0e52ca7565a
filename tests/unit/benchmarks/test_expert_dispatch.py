"""The benchmark of dispatch and combine, between two processes on the CPU."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import expert_dispatch


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["expert_dispatch", "--device", "cpu", *flags])
    expert_dispatch.main()


def test_rows_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    sizes = ("--tokens", "1", "5", "--widths", "24", "--experts", "8", "--chosen", "3", "--calls", "2")
    run(monkeypatch, *sizes, "--rounds", "3", "--output-json", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["skewed"], row["tokens"]) for row in rows] == [(False, 1), (False, 5), (True, 1), (True, 5)]
    assert all(row[f"{form}_us"] > 0 for row in rows for form in ("gather", "padded", "all_to_all"))
    assert capsys.readouterr().out.startswith("2 ranks (cpu), float32, 3 of 8 experts")


def test_experts_that_ranks_cannot_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="--experts 7: use a multiple of 2 ranks, of at least 16"):
        run(monkeypatch, "--experts", "7")
