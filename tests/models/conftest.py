"""One reference per row, one engine per row and setting, and the record of rows that passed."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints.proven import Proofs
from tests.helpers.checkpoints.reference import ReferenceOf, make_reference
from tests.helpers.checkpoints.tiny_models import tiny
from tests.helpers.engine.served import Served, Setting, served

_PROOFS = pytest.StashKey[Proofs]()


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> ReferenceOf:
    """Makes the reference of a row, by its name; cached."""
    return cache(lambda name: make_reference(tiny(name), tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def roomy(request: pytest.FixtureRequest, reference_of: ReferenceOf) -> Iterator[Served]:
    yield from _served(*request.param, reference_of)


@pytest.fixture(scope="module")
def tight(request: pytest.FixtureRequest, reference_of: ReferenceOf) -> Iterator[Served]:
    yield from _served(*request.param, reference_of)


def _served(name: str, setting: Setting, reference_of: ReferenceOf) -> Iterator[Served]:
    with served(reference_of(name), setting) as running:
        yield running


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="record in this file the rows that passed all their tests")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_PROOFS] = Proofs()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    marker = item.get_closest_marker("proves")
    if marker:
        name, tp = _row(item.callspec.params)
        proofs = item.config.stash[_PROOFS]
        if report.failed:
            proofs.fail(name)
        elif report.when == "call":
            for proof in marker.args:
                proofs.add(name, tp, proof)
    return report


def _row(params: dict[str, Any]) -> tuple[str, int]:
    """The row of a test and its number of ranks."""
    if "name" in params:
        return params["name"], 1
    ((name, setting),) = params.values()
    return name, setting.tp


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path:
        recorded = config.stash[_PROOFS].update(path)
        terminalreporter.write_line(f"{len(recorded)} rows recorded in {path}: {', '.join(recorded)}")
