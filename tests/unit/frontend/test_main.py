"""The frontend process: start, readiness, draining and imports."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from atom.shared.messages.codec import Decoder
from atom.shared.messages.engine import AddRequest, FinishReason
from atom.shared.messages.supervisor import INTERRUPT_SIGNAL, Dead, Heartbeat, Ready, ToSupervisor
from atom.shared.utils.process import spawn
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, Client, launch_frame
from tests.helpers.servers.wire import post_head, read_response

OUTPUT = tiny_tokenizer.tokenizer().encode("one two three four five", add_special_tokens=False)


class Process:
    """`python -m frontend.main`, connected to a fake core."""

    def __init__(self, core: FakeCore, process: subprocess.Popen[bytes], port: int, message: ToSupervisor):
        self.core = core
        self.process = process
        self.client = Client(port)
        self.message = message


@contextlib.contextmanager
def started(
    directory: Path, script: Script, shutdown_timeout: float = DEADLINE_S, reads_after_s: float = 0.0
) -> Iterator[Process]:
    """`reads_after_s`: so long the supervisor reads nothing."""
    checkpoint = tiny_tokenizer.checkpoint(directory)
    with contextlib.ExitStack() as stack:
        core = stack.enter_context(FakeCore(directory, lambda _: script, step_s=0.02))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        supervisor = stack.enter_context(zmq.Context().socket(zmq.PULL))
        stack.callback(supervisor.context.destroy, linger=0)
        frame = launch_frame(core, checkpoint, directory / "supervisor", listener.fileno(), shutdown_timeout)
        process = spawn("frontend.main", frame, pass_fds=[listener.fileno()])
        stack.callback(end, process)
        deadline = time.monotonic() + DEADLINE_S + reads_after_s
        if reads_after_s:
            with socket.socket(socket.AF_UNIX) as stopped:
                stopped.settimeout(DEADLINE_S)
                stopped.bind(str(directory / "supervisor"))
                stopped.listen()
                with stopped.accept()[0]:
                    time.sleep(reads_after_s)
        supervisor.bind(f"ipc://{directory}/supervisor")
        message: ToSupervisor = Heartbeat("")
        while isinstance(message, Heartbeat):
            assert supervisor.poll(int(DEADLINE_S * 1000)), "no message to the supervisor"
            assert time.monotonic() < deadline, "heartbeats alone"
            message = Decoder[ToSupervisor](ToSupervisor).decode(supervisor.recv())
        yield Process(core, process, listener.getsockname()[1], message)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(DEADLINE_S)
    assert process.stdin is not None
    process.stdin.close()


def begin_request(running: Process, stream: bool = False) -> http.client.HTTPConnection:
    """Send a request, and wait until the core has received it."""
    requests: list[AddRequest] = running.core.requests
    before = len(requests)
    connection = http.client.HTTPConnection("127.0.0.1", running.client.port, timeout=DEADLINE_S)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "go", "stream": stream}))
    running.core.wait_for(lambda: len(requests) > before)
    return connection


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    with started(tmp_path, Script(OUTPUT, FinishReason.MAX_TOKENS)) as running:
        assert running.message == Ready("frontend")
        running.core.wait_for(lambda: running.client.exchange("GET", "/ready")[0] == 200)
        may_end = threading.Event()
        running.core.waits = lambda: running.core.steps >= 2 and not may_end.is_set()
        with contextlib.closing(begin_request(running)) as connection:
            running.process.send_signal(signal.SIGTERM)
            running.core.wait_for(lambda: running.client.exchange("GET", "/ready")[0] == 503)
            status, data, headers = running.client.exchange("POST", "/v1/completions", {"prompt": "x"})
            assert (status, headers["retry-after"]) == (503, "2")
            assert "stopping" in json.loads(data)["error"]["message"]
            may_end.set()
            response = connection.getresponse()
            assert response.status == 200
            assert json.loads(response.read())["usage"]["completion_tokens"] == len(OUTPUT)
        assert running.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("interrupts", [True, False])
def test_unfinished_requests_get_an_error_response(tmp_path: Path, interrupts: bool) -> None:
    """After two signals that come before the process has run, and after the shutdown timeout."""
    timeout = DEADLINE_S if interrupts else 0.5
    with started(tmp_path, Script(OUTPUT, reason=None), shutdown_timeout=timeout) as running:
        running.core.wait_for(lambda: running.client.exchange("GET", "/ready")[0] == 200)
        with (
            contextlib.closing(begin_request(running)) as whole,
            contextlib.closing(begin_request(running, stream=True)) as streaming,
            socket.create_connection(("127.0.0.1", running.client.port), DEADLINE_S) as uploading,
        ):
            stream = streaming.getresponse()
            first = stream.readline()
            uploading.sendall(post_head(100) + b"{")
            running.process.send_signal(signal.SIGSTOP)
            running.process.send_signal(signal.SIGTERM)
            if interrupts:
                running.process.send_signal(INTERRUPT_SIGNAL)
            running.process.send_signal(signal.SIGCONT)
            data = first + stream.read()  # fails if the stream is truncated
            frames = data.decode().strip().split("\n\n")
            response = whole.getresponse()
            error = json.loads(response.read())["error"]
            assert read_response(uploading)[0] == 503
        assert (response.status, response.headers["Connection"], error["type"]) == (
            503,
            "close",
            "server_error",
        )
        assert "stopping" in error["message"]
        assert frames[0].startswith('data: {"id"') and frames[-1] == "data: [DONE]"
        assert json.loads(frames[-2].removeprefix("data: "))["error"] == error
        assert running.process.wait(DEADLINE_S) == 0


def test_a_supervisor_that_is_busy_learns_that_it_is_ready(tmp_path: Path) -> None:
    with started(tmp_path, Script(OUTPUT), reads_after_s=2.0) as running:
        assert running.message == Ready("frontend")


def test_a_broken_template_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_tokenizer, "TEMPLATE", "{% for %}")
    with started(tmp_path, Script(OUTPUT)) as running:
        assert isinstance(running.message, Dead)
        assert "chat template" in running.message.reason
        assert running.process.wait(DEADLINE_S) == 1


def test_a_supervisor_that_is_stopped_learns_why_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_tokenizer, "TEMPLATE", "{% for %}")
    with started(tmp_path, Script(OUTPUT), reads_after_s=2.0) as running:
        assert isinstance(running.message, Dead)
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
