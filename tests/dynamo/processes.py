"""Dynamo's frontend and our workers as processes on this machine: discovery by files, no etcd, no NATS."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.servers.random_server import MODEL_NAME
from tests.helpers.servers.server import child_processes

BLOCK_SIZE = 16
START_S = 180.0
STOP_S = 60.0
_LOOPBACK = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST", "DYN_EVENT_PLANE_HOST")


class Process:
    """A process group with its log, killed for certain by `kill`."""

    def __init__(self, name: str, command: list[str], directory: Path, **environment: str):
        self.name = name
        self.log = directory / f"{name}.log"
        settings = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DYN_")},
            **dict.fromkeys(_LOOPBACK, "127.0.0.1"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOGGING_CONFIG_PATH": "",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(directory),
            **environment,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, env=settings, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        """Wait until the log has these words."""
        deadline = time.monotonic() + START_S
        while words not in self.text():
            assert self.process.poll() is None, f"{self.name} ended:\n{self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"{self.name} is not ready:\n{self.text()[-3000:]}"
            time.sleep(0.1)

    def children(self) -> dict[int, str]:
        return child_processes(self.process.pid)

    def terminate(self) -> int:
        """SIGTERM to this process alone; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)


def worker(number: int, checkpoint: Path, directory: Path, *flags: str) -> Process:
    """One of our engines; its own HTTP port serves the model's files and its health."""
    arguments = ["-m", "atom.integrations.dynamo", "--model", str(checkpoint), "--load-dummy"]
    arguments += ["--dtype", "float32", "--device", "cpu", "--served-model-name", MODEL_NAME]
    arguments += ["--kv-cache-memory-bytes", str(1 << 28), "--cpu-threads", "1", *flags]
    return Process(f"worker-{number}", arguments, directory, DYN_SYSTEM_PORT="0")


def frontend(mode: str, directory: Path, port: int) -> Process:
    """Dynamo's own frontend with its router in `mode`; it lists the model once `models` says so."""
    arguments = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    arguments += ["--router-mode", mode, "--kv-cache-block-size", str(BLOCK_SIZE), "--migration-limit", "3"]
    if mode == "kv":
        # By its blocks, one running request would outweigh any prefix: prompts are long, outputs short.
        arguments.append("--no-router-track-active-blocks")
    return Process(f"frontend-{mode}", arguments, directory)


def wait_for_model(process: Process, port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError):
            answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10)
            if MODEL_NAME.encode() in answer.read():
                return
        assert process.process.poll() is None, f"the frontend ended:\n{process.text()[-3000:]}"
        assert time.monotonic() < deadline, f"no model is listed:\n{process.text()[-3000:]}"
        time.sleep(0.2)


def free_port() -> int:
    """A port for a program that takes no socket and does not tell which port it has chosen."""
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.contextmanager
def ending(*processes: Process) -> Iterator[None]:
    """All of them are gone when the block ends."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
