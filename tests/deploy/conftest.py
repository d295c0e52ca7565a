"""What the tests of deploy/ share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.servers.random_server import write_checkpoint
from tests.helpers.source import ROOT

TINY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with random weights."""
    return str(write_checkpoint(tmp_path_factory.mktemp("random") / "model", **TINY))


@pytest.fixture(scope="session")
def deploy() -> Iterator[Path]:
    """The folder."""
    yield ROOT / "deploy"
