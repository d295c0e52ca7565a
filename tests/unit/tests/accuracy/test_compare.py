"""The comparison of lm-eval's results, on files as it writes them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from tests.accuracy import compare as accuracy
from tests.accuracy.results import TOLERANCE, Run, compared, equal, read_run, text
from tests.helpers.checkpoints.gguf_files import hf_weights, write_gguf


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


def test_the_quantized_file_is_stated_and_not_compared(tmp_path: Path) -> None:
    plain = read_run(write(tmp_path / "a"))
    result = compared(plain, plain, read_run(write(tmp_path / "b", acc=0.25, said=" 8", greedy=False)))
    assert equal(result)
    assert [row["file"] for row in result["rows"]] == [0.25, 1.0]
    lines = text(result).splitlines()
    assert lines[0].split() == ["server", "transformers", "file"]
    assert lines[1].split() == ["capitals", "acc", "0.5000", "0.5000", "0.2500"]


def test_transformers_gets_the_expanded_file_and_the_server_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, hf_weights(), types=gguf.GGMLQuantizationType.Q8_0)
    served: list[tuple[str, ...]] = []
    asked: list[tuple[str, dict[str, Any]]] = []

    @contextlib.contextmanager
    def running_server(*flags: str) -> Iterator[Any]:
        served.append(flags)
        yield SimpleNamespace(url="http://127.0.0.1:1")

    def lm_eval(command: str, backend: str, model_args: str) -> Run:
        given = dict(pair.split("=", 1) for pair in model_args.split(","))
        directory = Path(given["pretrained" if backend == "hf" else "model"])
        asked.append((backend, json.loads((directory / "config.json").read_text())))
        assert list(directory.glob("*.safetensors")) and (directory / "tokenizer.json").exists()
        return read_run(write(tmp_path / str(len(asked))))

    monkeypatch.setattr(accuracy, "running_server", running_server)
    monkeypatch.setattr(accuracy, "lm_eval", lm_eval)
    result = accuracy.compare("lm_eval", str(file), 8)
    assert [backend for backend, _ in asked] == ["local-completions", "hf", "local-completions"]
    assert not any("quantization_config" in config for _, config in asked)
    plain, as_file = (dict(zip(flags[::2], flags[1::2], strict=True)) for flags in served)
    assert plain["--dtype"] == "float32" and plain["--model"] == plain["--served-model-name"]
    assert as_file["--model"] == str(file) and "--dtype" not in as_file
    assert result["model"] == "tiny" and "file" in result["rows"][0]


def test_rounding_is_none(tmp_path: Path) -> None:
    near = read_run(write(tmp_path / "a", score=-1.25 + TOLERANCE / 2))
    result = compared(near, read_run(write(tmp_path / "b")))
    assert equal(result) and result["largest_difference"] == pytest.approx(TOLERANCE / 2)
