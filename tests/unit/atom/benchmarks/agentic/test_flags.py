"""Flags set the distributions; those that conflict are refused."""

import pytest

from atom.benchmarks.agentic.flags import check, make_parser, session_model
from atom.benchmarks.agentic.sessions import SessionModel
from atom.benchmarks.serving.errors import BenchmarkError


def test_defaults_are_the_model_s() -> None:
    assert session_model(make_parser().parse_args(["--model", "m"])) == SessionModel()


def test_medians_are_set() -> None:
    flags = ["--first-input-tokens", "90", "--input-tokens", "50", "--output-tokens", "20", "--pause", "0.5"]
    model = session_model(make_parser().parse_args(["--model", "m", *flags]))
    drawn = model.first_input, model.input, model.output, model.pause_s
    assert [each.median for each in drawn] == [90, 50, 20, 0.5]
    assert model.input.sigma == SessionModel().input.sigma


@pytest.mark.parametrize(
    "flags",
    [
        ["--sweep", "1", "2", "--max-concurrency", "3"],
        ["--sweep", "1", "--trace", "x"],
        ["--trace", "x", "--save-trace", "y"],
    ],
)
def test_conflicts_are_refused(flags: list[str]) -> None:
    with pytest.raises(BenchmarkError, match="omit"):
        check(make_parser().parse_args(["--model", "m", *flags]))


@pytest.mark.parametrize("text", ["2", "-0.1", "x"])
def test_a_probability_is_from_0_to_1(text: str) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--model", "m", "--fork-probability", text])
