"""The rows of tiny models that a test runs over: one of each family by default, all with `-m models`."""

from collections.abc import Sequence
from itertools import product

import pytest

from tests.helpers.checkpoints.tiny_models import TINY_MODELS
from tests.helpers.engine.served import Setting

ON_TWO_RANKS = "qwen3"
"""The row that default runs also serve with two workers; the slower worker tests run it alone."""

FIRST_OF_FAMILIES = tuple({model.model_type: model.name for model in reversed(TINY_MODELS)}.values())
"""One row of each family, for default runs."""

OF_CACHES = ("qwen3", "gpt-oss", "deepseek-v3", "deepseek-v3.2", "qwen3-next", "kimi-linear")
"""A row with each kind of cache, all that the engine's core knows of a family: keys and values, also
with windows, latents, those with an indexer, states, and latents and states."""


def tight_rows() -> list[object]:
    """Parameters (name, setting): every row on one rank and on two; those `OF_CACHES` in default runs."""
    rows = product((model.name for model in TINY_MODELS), (1, 2))
    by_default = {1: OF_CACHES, 2: (ON_TWO_RANKS,)}
    return [_served(name, Setting(tp, tight=True), name in by_default[tp]) for name, tp in rows]


def roomy_rows() -> list[object]:
    """Parameters (name, setting): one row of each family on one rank and on two."""
    return [_served(name, Setting(tp, tight=False), False) for name, tp in product(FIRST_OF_FAMILIES, (1, 2))]


def _served(name: str, setting: Setting, by_default: bool) -> object:
    return pytest.param((name, setting), id=f"{name}-tp{setting.tp}", marks=_marks(by_default))


def model_rows(by_default: Sequence[str] = FIRST_OF_FAMILIES) -> list[object]:
    """Parameters: the name of every row."""
    return [
        pytest.param(model.name, id=model.name, marks=_marks(model.name in by_default))
        for model in TINY_MODELS
    ]


def _marks(every_run: bool) -> list[pytest.MarkDecorator]:
    return [] if every_run else [pytest.mark.models]
