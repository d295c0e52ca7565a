"""What holds for every test run."""

import logging
import multiprocessing.resource_tracker
import os
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

# Examples are the same in every run, so that a change fails for what it breaks. `random` draws new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("random", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True, scope="session")
def no_process_left_behind() -> Iterator[None]:
    """At the end of the run, a child that still lives is ended, and is a failure."""
    yield
    # multiprocessing keeps one helper of its own until the interpreter ends.
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid != tracker]
    described = []
    for child in left:
        try:
            described.append(f"{child.pid}: {' '.join(child.cmdline())}")
            child.kill()
        except psutil.NoSuchProcess:
            continue
    assert not described, f"processes left behind: {described}"


@pytest.fixture
def torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops run on torch's functions, which dispatch modes and profilers see, not on kernels in C++."""
    from atom_ops import native_impl

    monkeypatch.setattr(native_impl, "problem", lambda device: "not in this test")


@pytest.fixture(autouse=True)
def unconfigured_logging() -> Iterator[None]:
    """ATOM's logger is as at import for each test: `setup_logging` of an earlier one leaves nothing."""
    yield
    logger = logging.getLogger("atom")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
