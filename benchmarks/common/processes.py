"""Processes that a benchmark starts for one measurement."""

import subprocess

__all__ = ["stop"]

_STOP_S = 20.0


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process of `spawn` if it still runs, and its children with it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.stdin is not None
    process.stdin.close()
