"""One reference for each row, one engine for all cases of a row and a setting, and the record."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.proven import Proofs
from tests.helpers.reference import ReferenceOf, make_reference
from tests.helpers.served import Served, Setting, served
from tests.helpers.tiny_models import tiny

_PROOFS = pytest.StashKey[Proofs]()


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> ReferenceOf:
    """By the name of a row; made once."""
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
    parser.addoption("--record", type=Path, help="write what was proven to this file; needs every test")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_PROOFS] = Proofs()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    marker = item.get_closest_marker("proves")
    if marker and report.when == "call" and report.passed:
        name, tp = _row(item.callspec.params)
        for proof in marker.args:
            item.config.stash[_PROOFS].add(name, tp, proof)
    return report


def _row(params: dict[str, Any]) -> tuple[str, int]:
    """The name of the row that a test is about, and the number of ranks."""
    if "name" in params:
        return params["name"], 1
    ((name, setting),) = params.values()
    return name, setting.tp


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--record")
    if path and exitstatus == pytest.ExitCode.OK:
        session.config.stash[_PROOFS].write(path)
