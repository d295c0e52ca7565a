"""Which rows of the table of tiny models a test runs over: one of each family in every run, all on demand."""

from itertools import product

import pytest

from tests.helpers.served import Setting
from tests.helpers.tiny_models import TINY_MODELS

ON_TWO_RANKS = "qwen3"
"""The row that every run also serves with two workers."""


def first_of_families() -> list[str]:
    """The names of the rows that stand for their families in every run."""
    return list({model.model_type: model.name for model in reversed(TINY_MODELS)}.values())[::-1]


def in_every_run(name: str, setting: Setting | None = None) -> bool:
    """One row a family, in a tight engine on one rank; and one row in such an engine on two."""
    if setting is None:
        return name in first_of_families()
    if not setting.tight:
        return False
    return name == ON_TWO_RANKS if setting.tp == 2 else name in first_of_families()


def served_rows(settings: list[Setting]) -> list[object]:
    """Parameters (name, setting): every row in every setting."""
    names = [model.name for model in TINY_MODELS]
    return [
        pytest.param((name, setting), id=f"{name}-tp{setting.tp}", marks=_marks(in_every_run(name, setting)))
        for name, setting in product(names, settings)
    ]


def model_rows() -> list[object]:
    """Parameters: the name of every row."""
    return [
        pytest.param(model.name, id=model.name, marks=_marks(in_every_run(model.name)))
        for model in TINY_MODELS
    ]


def _marks(every_run: bool) -> list[pytest.MarkDecorator]:
    return [] if every_run else [pytest.mark.models]
