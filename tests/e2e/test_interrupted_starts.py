"""A signal between two instructions of a start, when a socket, a process or a directory has no owner yet.

An exception there would lose it: a lost socket lets the end of its context wait for ever.
"""

import contextlib
import os
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from atom.shared.config.engine import EngineConfig
from atom.shared.messages.engine import Sampling
from atom.shared.messages.flight_record import FORMAT, FlightRecord, RecordedRequest
from tests.helpers.servers.nodes import SECRET
from tests.helpers.servers.random_server import ARGS, ENDLESS
from tests.helpers.servers.server import ServerProcess

pytestmark = pytest.mark.timeout(120)

SIGTERM_STATUS = 128 + 15
COMMAND = [sys.executable, "-m", "tests.helpers.servers.interrupted_launch"]
EACH_CALL = [
    ("directory", 1),
    *[(call, number) for call in ("socket", "process") for number in (1, 2, 3, 4)],
]

PROGRAM = """
import signal, sys
from atom import LLMEngine
from tests.helpers.servers.interrupted_launch import CALLS, interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt(*CALLS["socket"], int(sys.argv[1]), signal.SIGINT)
try:
    LLMEngine(sys.argv[2], load_dummy=True, device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 27)
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
"""


def started(call: str, number: int, args: list[str], directory: Path) -> tuple[int, str]:
    """Status and output of a launch that leaves neither processes nor files."""
    return ended([*COMMAND, call, str(number), *args], directory)


def ended(command: list[str], directory: Path) -> tuple[int, str]:
    launch = ServerProcess(command, {"ATOM_CLUSTER_SECRET": SECRET})
    try:
        status = launch.wait()
        assert session_of(launch.process.pid) == []
        assert list(directory.iterdir()) == []
        return status, launch.text()
    finally:
        launch.kill()


def session_of(leader: int) -> list[str]:
    """The command lines of the processes of a session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader:
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_library_engine_ends(model: str, run_directories: Path, number: int) -> None:
    """A program has Python's own handler of SIGINT, which raises."""
    status, text = ended([sys.executable, "-c", PROGRAM, str(number), model], run_directories)
    assert (status, text.splitlines()[-1]) == (0, "interrupted")


@pytest.mark.parametrize(("call", "number"), EACH_CALL)
def test_a_server_ends(model: str, run_directories: Path, call: str, number: int) -> None:
    args = ["--model", model, *ARGS, "--host", "127.0.0.1", "--server-port", "0"]
    status, text = started(call, number, args, run_directories)
    assert status == 0 and "Traceback" not in text and "ready" not in text


@pytest.mark.parametrize(
    ("call", "number"), [("directory", 1), ("socket", 1), ("process", 1), ("process", 2)]
)
def test_a_plan_ends(model: str, run_directories: Path, call: str, number: int) -> None:
    status, text = started(call, number, ["--plan", "--model", model], run_directories)
    assert (status, text) == (SIGTERM_STATUS, "")


@pytest.mark.parametrize(("call", "number"), [("directory", 1), ("socket", 1), ("process", 1)])
def test_a_node_that_joins_ends(model: str, run_directories: Path, call: str, number: int) -> None:
    place = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "-dp", "2"]
    status, text = started(call, number, [*place, "--model", model, *ARGS], run_directories)
    assert status == 0 and "Traceback" not in text and "joins" not in text


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_replay_ends(model: str, run_directories: Path, tmp_path: Path, number: int) -> None:
    greedy = Sampling(0.0, 0, 1.0, 0.0, 0)
    one = RecordedRequest("r", 0, "decoding", 0, True, 5, 3, ENDLESS, 0, 0, 0, False, greedy)
    config = EngineConfig()
    record = FlightRecord(FORMAT, "1", "now", "why", False, 0, "X", False, [], 0, 1, [one], [], config)
    file = tmp_path / "record.json"
    file.write_bytes(msgspec.json.encode(record))
    args = ["--replay-file", str(file), "--model", model, *ARGS]
    status, text = started("socket", number, args, run_directories)
    assert status == SIGTERM_STATUS and "Traceback" not in text
