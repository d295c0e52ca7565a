"""Processes that run collectives."""

from collections.abc import Iterator

import pytest

from tests.helpers.parallel.ranks import Ranks


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.kill()
