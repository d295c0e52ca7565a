"""Which rows of the table of tiny models a test runs over: one of each family in every run, all on demand."""

from collections.abc import Sequence
from itertools import product

import pytest

from tests.helpers.served import Setting
from tests.helpers.tiny_models import TINY_MODELS

ON_TWO_RANKS = "qwen3"
"""The row that every run also serves with two workers, and whose every kind of tensor it changes."""

FIRST_OF_FAMILIES = tuple({model.model_type: model.name for model in reversed(TINY_MODELS)}.values())
"""The rows that stand for their families in every run."""


def tight_rows() -> list[object]:
    """Parameters (name, setting): every row on one rank and on two; one of each in every run."""
    rows = product((model.name for model in TINY_MODELS), (1, 2))
    in_every_run = {1: FIRST_OF_FAMILIES, 2: (ON_TWO_RANKS,)}
    return [_served(name, Setting(tp, tight=True), name in in_every_run[tp]) for name, tp in rows]


def roomy_rows() -> list[object]:
    """Parameters (name, setting): one row of each family on one rank and on two."""
    return [_served(name, Setting(tp, tight=False), False) for name, tp in product(FIRST_OF_FAMILIES, (1, 2))]


def _served(name: str, setting: Setting, in_every_run: bool) -> object:
    return pytest.param((name, setting), id=f"{name}-tp{setting.tp}", marks=_marks(in_every_run))


def model_rows(in_every_run: Sequence[str] = FIRST_OF_FAMILIES) -> list[object]:
    """Parameters: the name of every row."""
    return [
        pytest.param(model.name, id=model.name, marks=_marks(model.name in in_every_run))
        for model in TINY_MODELS
    ]


def _marks(every_run: bool) -> list[pytest.MarkDecorator]:
    return [] if every_run else [pytest.mark.models]
