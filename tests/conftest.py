"""What holds for every test run."""

import multiprocessing.resource_tracker
from collections.abc import Iterator

import psutil
import pytest


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
