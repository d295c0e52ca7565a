"""Starts child processes that cannot outlive their parent, and reads the launch message in them."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from atom.shared.utils.bytecode import bytecode_variables

T = TypeVar("T")

_PARENT = "_ATOM_PARENT_PID"
"""Variable of a child: its parent; empty if that may not end with the thread that has started it."""
_PR_SET_PDEATHSIG = 1
_MAX_LAUNCH_BYTES = 16 * 1024 * 1024
_MAX_OUTPUT_BYTES = 16 * 1024 * 1024
_TURN_S = 0.1


def spawn(
    module: str,
    launch: msgspec.Struct,
    pass_fds: Sequence[int] = (),
    stdout: int | None = None,
    stderr: int | None = None,
    name: str = "",
) -> subprocess.Popen[bytes]:
    """Start `python -m module` and send it `launch`; the child reads it by `read_launch`.

    `name` is its argument, which it ignores: for people who list processes, and tools that look for one.
    The child's standard input stays open until this process ends or closes it.
    """
    frame = msgspec.json.encode(launch)
    # PR_SET_PDEATHSIG is bound to the spawning *thread*: from another than the main thread it would
    # kill the child when that thread ends. There the end of the pipe alone ends the child.
    in_main_thread = threading.current_thread() is threading.main_thread()
    child = subprocess.Popen(
        # -P: a folder in the working directory must not shadow one of our packages.
        [sys.executable, "-P", "-m", module, *([name] if name else [])],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        # Signals to the supervisor's process group (Ctrl-C, a service manager) must not reach the child.
        process_group=0,
        env={**module_environment(), _PARENT: str(os.getpid()) if in_main_thread else ""},
    )
    assert child.stdin is not None
    # The exit status of a child that has died already is reported later.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(len(frame).to_bytes(4, "little") + frame)
        child.stdin.flush()
    return child


def last_line(
    child: subprocess.Popen[bytes], deadline: float, on_turn: Callable[[], None] = lambda: None
) -> bytes:
    """Wait for the end of a child of `spawn` with stdout=PIPE; returns the last line that it printed.

    Kills the child and raises TimeoutError if it has not ended at `deadline`, a time.monotonic(). `on_turn`,
    called several times a second, may raise an error, which ends the child, too.
    """
    assert child.stdout is not None and child.stdin is not None
    output = b""
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN | select.POLLHUP)
    try:
        while True:
            on_turn()
            left_s = max(deadline - time.monotonic(), 0)
            if poll.poll(min(left_s, _TURN_S) * 1000):
                if not (piece := os.read(child.stdout.fileno(), 1 << 16)):
                    child.wait(max(deadline - time.monotonic(), 0))
                    return output.rstrip().rpartition(b"\n")[2]
                output = (output + piece)[-_MAX_OUTPUT_BYTES:]
            elif not left_s:
                raise TimeoutError
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def read_launch(kind: type[T]) -> T:
    """Read the parent's launch frame. From here on this process ends with its parent.

    Raises ValueError when standard input holds no such frame, and no parent was going to send one.
    """
    _die_with_parent()
    size = int.from_bytes(_read_exactly(4), "little")
    if not 0 < size <= _MAX_LAUNCH_BYTES:
        raise ValueError("this module is started by atom-launch, not by hand")
    launch = msgspec.json.decode(_read_exactly(size), type=kind)
    threading.Thread(target=_exit_at_end_of_input, name="parent-watch", daemon=True).start()
    return launch


def module_environment() -> dict[str, str]:
    """This process's environment, in which `python -P -m` finds the packages that this process runs."""
    path = os.pathsep.join([_import_root(), *_inherited_python_path()])
    return {**os.environ, **bytecode_variables(os.environ), "PYTHONPATH": path}


def _import_root() -> str:
    return str(Path(__file__).resolve().parents[3])


def _inherited_python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _die_with_parent() -> None:
    parent = os.environ.get(_PARENT, "")
    if not parent.isdigit():
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)  # the parent died before prctl


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            if _PARENT in os.environ:
                os._exit(1)  # the parent was stopped before it had sent the frame
            raise ValueError("this module is started by atom-launch, not by hand")
        data += piece
    return data


def _exit_at_end_of_input() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)
