"""What several tests of whole servers need."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.random_server import write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with random weights."""
    return str(write_checkpoint(tmp_path_factory.mktemp("random") / "model"))


@pytest.fixture
def run_directories(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the servers of a test put theirs; short, since sockets lie in them."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.fixture
def shared_memory_is_left_as_it_was() -> Iterator[None]:
    """Nothing new lies in it that no process maps; other tests run at the same time."""
    before = set(os.listdir("/dev/shm"))
    yield
    new = set(os.listdir("/dev/shm")) - before
    assert not new - _mapped_shared_memory()


def _mapped_shared_memory() -> set[str]:
    """Names below /dev/shm that living processes have mapped."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found |= {line.rpartition("/dev/shm/")[2] for line in path.read_text().splitlines()}
    return found
