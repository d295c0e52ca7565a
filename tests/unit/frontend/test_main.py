"""The frontend process: start, readiness, draining and imports."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from atom.messages.codec import Decoder
from atom.messages.engine import AddRequest, FinishReason
from atom.messages.supervisor import Dead, Ready, ToSupervisor
from atom.utils.process import spawn
from tests.helpers import tiny_tokenizer
from tests.helpers.fake_core import FakeCore, Script
from tests.helpers.http_server import DEADLINE_S, Client, launch_frame

ANSWER = tiny_tokenizer.tokenizer().encode("one two three four five", add_special_tokens=False)


class Process:
    """`python -m frontend.main` with a fake core behind it."""

    def __init__(self, core: FakeCore, process: subprocess.Popen[bytes], port: int, message: ToSupervisor):
        self.core = core
        self.process = process
        self.client = Client(port)
        self.message = message


@contextlib.contextmanager
def started(directory: Path, script: Script) -> Iterator[Process]:
    checkpoint = tiny_tokenizer.checkpoint(directory)
    with contextlib.ExitStack() as stack:
        core = stack.enter_context(FakeCore(directory, lambda _: script, step_s=0.02))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        supervisor = stack.enter_context(zmq.Context().socket(zmq.PULL))
        stack.callback(supervisor.context.destroy, linger=0)
        supervisor.bind(f"ipc://{directory}/supervisor")
        frame = launch_frame(core, checkpoint, directory / "supervisor", listener.fileno())
        process = spawn("frontend.main", frame, pass_fds=[listener.fileno()])
        stack.callback(end, process)
        assert supervisor.poll(int(DEADLINE_S * 1000)), "the frontend sent no message"
        message = Decoder[ToSupervisor](ToSupervisor).decode(supervisor.recv())
        yield Process(core, process, listener.getsockname()[1], message)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(DEADLINE_S)
    assert process.stdin is not None
    process.stdin.close()


def begin_request(running: Process) -> http.client.HTTPConnection:
    """Send a request, and wait until the core has received it."""
    connection = http.client.HTTPConnection("127.0.0.1", running.client.port, timeout=DEADLINE_S)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "go"}))
    requests: list[AddRequest] = running.core.requests
    running.core.wait_for(lambda: requests)
    return connection


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    with started(tmp_path, Script(ANSWER, FinishReason.MAX_TOKENS)) as running:
        assert running.message == Ready("frontend")
        running.core.wait_for(lambda: running.client.exchange("GET", "/ready")[0] == 200)
        with contextlib.closing(begin_request(running)) as connection:
            running.process.send_signal(signal.SIGTERM)
            running.core.wait_for(lambda: running.client.exchange("GET", "/ready")[0] == 503)
            status, data, headers = running.client.exchange("POST", "/v1/completions", {"prompt": "x"})
            assert (status, headers["retry-after"]) == (503, "2")
            assert "stopping" in json.loads(data)["error"]["message"]
            answer = connection.getresponse()
            assert answer.status == 200
            assert json.loads(answer.read())["usage"]["completion_tokens"] == len(ANSWER)
        assert running.process.wait(DEADLINE_S) == 0


def test_a_second_sigterm_ends_draining(tmp_path: Path) -> None:
    with started(tmp_path, Script(ANSWER, reason=None)) as running:
        running.core.wait_for(lambda: running.client.exchange("GET", "/ready")[0] == 200)
        with contextlib.closing(begin_request(running)):
            running.process.send_signal(signal.SIGTERM)
            running.core.wait_for(lambda: running.client.exchange("GET", "/ready")[0] == 503)
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(DEADLINE_S) == 0


def test_a_broken_template_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_tokenizer, "TEMPLATE", "{% for %}")
    with started(tmp_path, Script(ANSWER)) as running:
        assert isinstance(running.message, Dead)
        assert "chat template" in running.message.reason
        assert running.process.wait(DEADLINE_S) == 1


def test_heavy_libraries_are_not_imported() -> None:
    code = (
        "import sys, frontend.main;"
        "print(sorted({'torch', 'transformers', 'numpy', 'pydantic'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
