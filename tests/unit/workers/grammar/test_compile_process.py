"""A fork that compiles for a request that is gone is ended by the kernel."""

import signal
import socket
import subprocess
import sys

import pytest

DEADLINE_S = 60.0
FORK = """
import socket, sys, time
from workers.grammar.compile_process import _ended_by_its_peer

connection = socket.socket(fileno=int(sys.argv[1]))
assert connection.recv(10) == b"source"
if sys.argv[2] == "late":
    assert sys.stdin.read() == ""
with _ended_by_its_peer(connection):
    if sys.argv[2] != "answers":
        print("compiles", flush=True)
        time.sleep(600)
connection.sendall(b"x" * (1 << 22))
"""


@pytest.mark.parametrize("order", ["early", "late"])
def test_a_fork_ends_with_its_connection(order: str) -> None:
    """Whether that is closed while it compiles or before."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fork = subprocess.Popen(
            [sys.executable, "-c", FORK, str(theirs.fileno()), order],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        theirs.close()
        with fork:
            ours.sendall(b"source")
            ours.shutdown(socket.SHUT_WR)
            if order == "early":
                assert fork.stdout is not None and fork.stdout.readline() == b"compiles\n"
            ours.close()
            assert fork.stdin is not None
            fork.stdin.close()
            assert fork.wait(DEADLINE_S) == -signal.SIGIO


def test_an_answer_that_is_read_slowly_ends_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fork = subprocess.Popen(
            [sys.executable, "-c", FORK, str(theirs.fileno()), "answers"], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        with fork:
            ours.settimeout(DEADLINE_S)
            ours.sendall(b"source")
            ours.shutdown(socket.SHUT_WR)
            received = 0
            while piece := ours.recv(1 << 16):
                received += len(piece)
            assert fork.wait(DEADLINE_S) == 0
    assert received == 1 << 22
