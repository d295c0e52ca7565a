"""Stacks of all threads of a process that may hang: a signal makes it write them to a file of its life.

The handler is in C and needs no running interpreter: it works in a loop, in a system call and while a library
holds the GIL, but not in a process that is stopped.
"""

import faulthandler
import signal
from pathlib import Path
from typing import TextIO

__all__ = ["DUMP_SIGNAL", "STACKS_SUFFIX", "add_note", "dump_stacks_on_signal"]

DUMP_SIGNAL = signal.SIGUSR2
STACKS_SUFFIX = ".stacks"

_file: TextIO | None = None


def dump_stacks_on_signal(supervisor: str, name: str) -> None:
    """From now on DUMP_SIGNAL appends the stacks to a file next to `supervisor`, the socket of this life.

    The file is called `name`, with STACKS_SUFFIX, and is empty until then. Raises OSError.
    """
    global _file
    path = Path(supervisor.removeprefix("ipc://")).parent / f"{name}{STACKS_SUFFIX}"
    _file = path.open("a", encoding="utf-8")
    faulthandler.register(DUMP_SIGNAL, _file, all_threads=True, chain=False)


def add_note(text: str) -> None:
    """Append a text to the file, if there is one."""
    if _file is not None:
        _file.write(f"{text}\n")
        _file.flush()
