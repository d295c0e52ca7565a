"""docs/measurements/roofline.md has every recorded step, and says where its time goes."""

import re
import tomllib
from dataclasses import replace

import pytest

from benchmarks.simulation.step_floor import StepShape, step_floor
from tests.helpers.source import ROOT
from tools.docs_tables import with_table
from tools.roofline_table import profiles, recorded_steps, rest_of, roofline_tables

NUMBER = re.compile(r"(?<=\| )\d+(?:\.\d+)?(?= \|)")
"""A cell that is a number."""
PAGE = ROOT / "docs/measurements/roofline.md"
STEPS = {(step.title, step.shape.rows) for step in recorded_steps()}


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text, roofline_tables()) == text, "run `make docs`"


@pytest.mark.parametrize(
    "model", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-8B-FP8", "Qwen3-8B-INT4", "Qwen3-30B-A3B", "gpt-oss-20b-MXFP4"]
)
def test_each_model_has_a_small_and_two_large_batches(model: str) -> None:
    assert {(model, rows) for rows in (1, 64, 256)} <= STEPS


def test_no_step_is_faster_than_its_floor() -> None:
    floors = [step_floor(step.model, step.shape).seconds * 1e3 / step.reached_ms for step in recorded_steps()]
    assert min(floors) > 0 and max(floors) < 1


def test_every_source_is_there() -> None:
    """What steps.toml copies from a text stands in that text."""
    for step in recorded_steps():
        page, _, _ = step.source.partition("#")
        text = (PAGE.parent / page).read_text(encoding="utf-8")
        figures = {f"{step.reached_ms:.{digits}f}" for digits in (1, 2, 3)}
        figures.add(f"{step.reached_ms * 1e3:.0f}")  # microseconds
        assert any(figure in text for figure in figures), step


def test_figures_of_families_are_those_of_their_section() -> None:
    recorded = tomllib.loads((PAGE.parent / "results/steps.toml").read_text(encoding="utf-8"))
    lines = (PAGE.parent / "steps.md").read_text(encoding="utf-8").splitlines()
    tables = [[float(cell) for cell in NUMBER.findall(line)] for line in lines if line.startswith("|")]
    for family in recorded["families"]:
        for name, *figures in family["rows"]:
            assert figures in tables, name


def test_the_rest_adds_up_to_the_step_without_its_floor() -> None:
    for profile in profiles():
        rest = rest_of(profile)
        assert sum(rest.values()) == pytest.approx(profile.reached_ms - sum(profile.floors_ms()))
        assert all(value >= 0 for kind, value in rest.items() if kind != "gaps"), profile.title


def test_a_profile_that_cannot_be_split_is_an_error() -> None:
    one = next(profile for profile in profiles() if profile.model == "Qwen3-8B")
    with pytest.raises(ValueError, match="kernel new_kernel has no kind: add it to KINDS"):
        rest_of(replace(one, microseconds={"new_kernel": 1.0}))
    with pytest.raises(ValueError, match="FLOPs bound this step"):
        rest_of(replace(one, shape=StepShape(512, 1)))
