"""Servers that take turns: each is started, awaited and ended; their figures become a table."""

import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.agentic_servers import Contender, running, table

SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    count = 0

    def do_GET(self):
        Handler.count += 1
        self.send_response(200 if Handler.count > 1 else 503)
        self.end_headers()

open(sys.argv[1], "w").write(str(os.getpid()))
HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def test_a_server_runs_until_its_block_ends(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = shlex.join([sys.executable, str(tmp_path / "server.py"), "{model}", "{port}"])
    with running(Contender("one", command), str(tmp_path / "pid"), port, tmp_path / "logs" / "one.log"):
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    contender = Contender("one", shlex.join([sys.executable, "-c", "print('why'); exit(3)", "{port}"]))
    with (
        pytest.raises(BenchmarkError, match=r"one ended with status 3: see .*one\.log"),
        running(contender, "m", 1, tmp_path / "one.log"),
    ):
        pass
    assert (tmp_path / "one.log").read_text() == "why\n"
    with pytest.raises(BenchmarkError, match="has no {port}"):
        Contender("two", "serve {model}").arguments("m", 1)


def test_figures_are_medians_of_the_rounds() -> None:
    def result(rate: float, hits: float | None) -> dict[str, object]:
        serving = {"output_throughput": rate, "distributions": {"tpot": {"median": 10.0}}}
        return {"serving": serving, "first_ttft_ms": 1.0, "later_ttft_ms": 2.0, "hit_rate": hits}

    lines = table({"a": [result(1, 0.5), result(9, 0.5), result(2, 0.5)], "b": [result(3, None)]})
    assert lines[2:] == ["| a | 2 | 1 | 2 | 10 | 0.5 |", "| b | 3 | 1 | 2 | 10 | not told |"]
