"""Servers that take turns: each is started, awaited and ended; their figures become a table."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.agentic_servers import Contender, running, table
from tests.helpers.servers.ports import kept_port

SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    count = 0

    def do_POST(self):
        Handler.count += 1
        self.send_response(int(sys.argv[3]) if Handler.count > 1 else 503)
        self.end_headers()
        self.wfile.write(b"why")

open(sys.argv[1], "w").write(str(os.getpid()))
HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@contextlib.contextmanager
def serving(place: Path, status: int) -> Iterator[int]:
    """The process id of a server that says 503 once, then `status`."""
    (place / "server.py").write_text(SERVER)
    command = shlex.join([sys.executable, str(place / "server.py"), "{model}", "{port}", str(status)])
    log = place / "logs" / "one.log"
    with kept_port() as port, running(Contender("one", command), str(place / "pid"), port, log, 30):
        yield int((place / "pid").read_text())


def test_a_server_runs_until_its_block_ends(tmp_path: Path) -> None:
    with serving(tmp_path, status=200) as pid:
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_refuses_requests_is_told_with_its_reason(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchmarkError, match="one refused a request, 404: why"),
        serving(tmp_path, status=404),
    ):
        pass


def test_a_server_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    contender = Contender("one", shlex.join([sys.executable, "-c", "print('why'); exit(3)", "{port}"]))
    with (
        pytest.raises(BenchmarkError, match=r"one ended with status 3: see .*one\.log"),
        running(contender, "m", 1, tmp_path / "one.log", 30),
    ):
        pass
    assert (tmp_path / "one.log").read_text() == "why\n"
    with pytest.raises(BenchmarkError, match="has no {port}"):
        Contender("two", "serve {model}").arguments("m", 1)


def test_figures_are_medians_of_the_rounds() -> None:
    def result(rate: float, hits: float | None) -> dict[str, object]:
        serving = {"output_throughput": rate, "distributions": {"tpot": {"median": 10.0}}}
        return {
            "serving": serving,
            "sessions": [{"failed": 1}, {"failed": 2}],
            "first_ttft_ms": 1.0,
            "later_ttft_ms": 2.0,
            "hit_rate": hits,
            "known_rate": 0.8,
            "good_output_throughput": None,
        }

    lines = table({"a": [result(1, 0.5), result(9, 0.5), result(2, 0.5)], "b": [result(3, None)]})
    assert lines[2:] == [
        "| a | 3 | 2 | 1 | 2 | 10 | 0.5 | 0.8 | not told |",
        "| b | 3 | 3 | 1 | 2 | 10 | not told | 0.8 | not told |",
    ]
