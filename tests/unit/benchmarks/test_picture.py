"""The picture of throughput against interactivity: which results it shows, and that it is up to date."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.pages.chart import Curve, Panel, Point, svg
from benchmarks.picture import panels, picture
from tests.helpers.source import ROOT

RESULTS = ROOT / "docs/measurements/results"

Keep = Callable[..., None]


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    """Writes a kept serving result of Qwen3-0.6B, 64 requests of 1024 tokens in and 128 out."""

    def write(name: str, **changes: Any) -> None:
        result = {
            "benchmark": "serving", "command": "c", "hardware": "NVIDIA H200, 16 CPU cores", "software": "s",
            "date": "2026-01-01", "server": "atom-launch --model Qwen3-0.6B -tp 1", "backend": "vllm",
            "model_id": "some/Qwen3-0.6B/", "request_rate": "inf", "max_concurrency": 64, "duration": 1.0,
            "completed": 640, "request_throughput": 80.0, "output_throughput": 11000.0,
            "median_tpot_ms": 4.0, "total_input_tokens": 640 * 1024, "total_output_tokens": 640 * 128,
        }  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(result | changes))

    return write


def test_the_kept_picture_shows_the_kept_results() -> None:
    kept = (RESULTS / "throughput-interactivity.svg").read_text(encoding="utf-8")
    assert kept == picture(RESULTS), "run `make bench-document`"


def test_decode_steps_become_tokens_per_second(tmp_path: Path) -> None:
    content = {
        "settings": {"hardware": "NVIDIA H200, driver 1", "software": "s", "options": {}},
        "rows": {"batch-1": {"value": 4.0, "measured": "d"}, "batch-64": {"value": 5.0, "measured": "d"}},
    }
    (tmp_path / "Qwen3-8B.json").write_text(json.dumps(content))
    (panel,) = panels(tmp_path)
    ours, theirs = panel.curves
    assert (panel.title, ours.engine, theirs.engine) == ("Qwen3-8B, decode", "ATOM", "vLLM")
    assert ours.points == [Point("1", 250.0, 250.0), Point("64", 200.0, 12800.0)]
    # 6.02 ms a step, as recorded.
    assert theirs.points[1] == Point("64", pytest.approx(166.11, abs=0.01), pytest.approx(10631.2, abs=0.1))


@pytest.mark.parametrize(
    ("field", "value"),
    [("hardware", "NVIDIA B200, 16 CPU cores"), ("shrink", 8), ("options", {"tensor_parallel_size": 2})],
)
def test_other_hardware_trials_and_several_gpus_are_left_out(
    tmp_path: Path, field: str, value: object
) -> None:
    settings = {"hardware": "NVIDIA H200, driver 1", "software": "s", "options": {}} | {field: value}
    rows = {"batch-1": {"value": 4.0, "measured": "d"}}
    (tmp_path / "Qwen3-8B.json").write_text(json.dumps({"settings": settings, "rows": rows}))
    assert panels(tmp_path) == []
    with pytest.raises(BenchmarkError, match="has no results of a model"):
        picture(tmp_path)


def test_serving_runs_are_sorted_by_concurrency(tmp_path: Path, keep: Keep) -> None:
    keep("b")
    keep("a", max_concurrency=256, completed=2560, total_input_tokens=2560 * 1024,
         total_output_tokens=2560 * 128, output_throughput=17000.0, median_tpot_ms=10.0)  # fmt: skip
    (panel,) = panels(tmp_path)
    assert panel.title == "Qwen3-0.6B, serving 1024 in, 128 out"
    assert panel.curves[0].points == [Point("64", 250.0, 11000.0), Point("256", 100.0, 17000.0)]
    assert [point.label for point in panel.curves[1].points] == ["1", "64", "256"]
    assert "serving runs" in picture(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_id": "Qwen3-4B"},
        {"request_rate": 4.0},
        {"max_concurrency": None},
        {"total_input_tokens": 640 * 1000},
        {"total_output_tokens": 640 * 100},
        {"hardware": "CPU: AMD EPYC, 2 cores"},
        {"server": "atom-launch --model Qwen3-0.6B -tp 2"},
        {"server": "atom-launch --model Qwen3-0.6B --tensor-parallel-size=16"},
    ],
)
def test_serving_runs_of_another_kind_are_left_out(
    tmp_path: Path, keep: Keep, changes: dict[str, Any]
) -> None:
    keep("other", **changes)
    assert panels(tmp_path) == []


def test_the_picture_is_xml_and_all_points_are_inside(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    root = ElementTree.fromstring(picture(tmp_path))
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == sum(len(curve.points) for panel in panels(tmp_path) for curve in panel.curves)
    for circle in circles:
        assert 52 <= float(circle.attrib["cx"]) <= 292
        assert 30 <= float(circle.attrib["cy"]) <= 208


def test_titles_are_escaped() -> None:
    text = svg([Panel("a < b & c", [Curve("x", [Point("1", 3.0, 7.0)])])], [])
    ElementTree.fromstring(text)
    assert "a &lt; b &amp; c" in text
