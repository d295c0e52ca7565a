"""Runs compilers, none of which outlives this process, however it ends; nor do their temporary files."""

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

# Runs the command in a process group of its own, and kills the group when the pipe on standard input ends:
# compilers start further processes, which nothing else would end. `kill 0` is to its own group.
_UNTIL_END_OF_INPUT = """
ulimit -t $1 || exit
shift
exec 3<&0 </dev/null
{ read -r _ <&3; rm -rf "$TMPDIR"; kill -KILL 0; } &
"$@"
status=$?
kill $!
exit $status
"""


class CompilerError(Exception):
    """A command failed or took too long; says which and why."""


def run(commands: Sequence[Sequence[str]], scratch: Path, deadline_s: float, cpu_s: int) -> None:
    """Run the commands at the same time; their temporary files are in `scratch`.

    Each process of theirs may use `cpu_s` seconds of processor time, so that a compiler that never ends is
    told from one that shares its cores with other programs. If this process dies meanwhile, they are killed
    and `scratch` is removed. Raises CompilerError.
    """
    deadline = time.monotonic() + deadline_s
    with ExitStack() as stack:
        reading, writing = os.pipe()
        try:
            with os.fdopen(reading):
                running = [stack.enter_context(_start(each, scratch, reading, cpu_s)) for each in commands]
            for command, process in zip(commands, running, strict=True):
                _wait(command[0], process, deadline, deadline_s)
        finally:
            os.close(writing)  # ends those that still run


def _start(command: Sequence[str], scratch: Path, stdin: int, cpu_s: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["sh", "-c", _UNTIL_END_OF_INPUT, "sh", str(cpu_s), *command],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "TMPDIR": str(scratch)},
    )


def _wait(compiler: str, process: "subprocess.Popen[str]", deadline: float, deadline_s: float) -> None:
    try:
        _, said = process.communicate(timeout=max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        text = f"{compiler} did not compile the kernels within {deadline_s:.0f} s"
        raise CompilerError(text) from None
    if process.returncode:
        first = next((line for line in said.splitlines() if "error" in line), said[:200])
        raise CompilerError(f"{compiler} cannot compile the kernels: {first}")
