"""A `vllm serve` of its own for one run."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

START_S = 900.0
_STOP_S = 60.0
_COMMAND = "from vllm.entrypoints.cli.main import main; main()"
"""What the console script `vllm` runs."""


@contextlib.contextmanager
def serving(
    python: str, model: str, flags: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[str]:
    """The address of a ready `vllm serve`, which is gone when the block ends.

    Raises TimeoutError, with the end of its log, if it ends or is not ready in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-c", _COMMAND, "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_STOP_S)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=10).read()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(
                f"vllm serve ended or is not ready after {START_S:.0f} s:\n{log.read_text()[-3000:]}"
            )
        time.sleep(1)
