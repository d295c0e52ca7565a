"""The comparison of lm-eval's results, on files as it writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.results import TOLERANCE, compared, equal, read_run, text


def write(
    folder: Path, acc: float = 0.5, score: float = -1.25, greedy: bool = True, said: str = " 6, 7"
) -> Path:
    results = {
        "capitals": {"alias": "capitals", "acc,none": acc, "acc_stderr,none": 0.1, "sample_len": 2},
        "sequences": {"exact_match,next-item": 1.0, "exact_match_stderr,next-item": 0.0},
    }
    samples: dict[str, list[dict[str, Any]]] = {
        "capitals": [
            {"doc_id": 1, "resps": [[["-3.5", "False"]], [["-4.5", "False"]]]},
            {"doc_id": 0, "resps": [[[str(score), str(greedy)]], [["-2.5", "False"]]]},
        ],
        "sequences": [{"doc_id": 0, "resps": [[said]]}],
    }
    (folder / "model").mkdir(parents=True)
    versions = {"lm_eval_version": "0.4", "transformers_version": "5.2"}
    (folder / "model/results_2026.json").write_text(json.dumps({"results": results, **versions}))
    for task, rows in samples.items():
        path = folder / f"model/samples_{task}_2026.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    result = compared(read_run(write(tmp_path / "a")), read_run(write(tmp_path / "b")))
    assert equal(result) and result["largest_difference"] == 0.0
    assert (result["answers"], result["scores"]) == (5, 4)
    assert result["harness"] == "lm-eval 0.4, transformers 5.2"
    assert [(row["task"], row["metric"], row["server"]) for row in result["rows"]] == [
        ("capitals", "acc", 0.5),
        ("sequences", "exact_match", 1.0),
    ]
    assert "differ: 0; generated texts that differ: 0 of 1" in text(result)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"acc": 0.25}, {}),
        ({"greedy": False}, {"different_flags": 1}),
        ({"said": " 6,"}, {"different_texts": 1}),
        ({"score": -1.25 - 2 * TOLERANCE}, {"different_flags": 0}),
    ],
)
def test_whatever_differs_is_a_fault(change: dict[str, Any], found: dict[str, int], tmp_path: Path) -> None:
    result = compared(read_run(write(tmp_path / "a", **change)), read_run(write(tmp_path / "b")))
    assert not equal(result) and result.items() >= found.items()


def test_rounding_is_none(tmp_path: Path) -> None:
    near = read_run(write(tmp_path / "a", score=-1.25 + TOLERANCE / 2))
    result = compared(near, read_run(write(tmp_path / "b")))
    assert equal(result) and result["largest_difference"] == pytest.approx(TOLERANCE / 2)
