"""What several tests of whole servers need."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.servers.random_server import write_checkpoint
from tests.helpers.servers.shared_memory import SharedMemoryWatch


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
    """The processes of a test leave nothing in it."""
    watch = SharedMemoryWatch()
    yield
    assert not watch.end()


@pytest.fixture
def hangups() -> Iterator[None]:
    """Processes that are started get SIGHUP, under nohup, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
