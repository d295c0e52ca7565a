"""Make's targets one after another, whatever their results, and one summary of their tests.

    python -m tools.run_phases TARGET [TARGET ...]

Prints what they print, then a line for each target and every test that failed. Exit status 0 if none
failed, 1 if one did, 130 after Ctrl-C. A target none of whose tests are selected has not failed.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

_KEPT_BYTES = 1 << 22
"""End of a target's output in which its results are found."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_COUNTS = re.compile(r"^=*\s*(no tests ran|\d+ [a-z]+(?:, \d+ [a-z]+)*) in [\d.]+s", re.MULTILINE)
_NOTHING_SELECTED = re.compile(r"no tests ran|\d+ deselected")
_FAILED = re.compile(r"^(?:FAILED|ERROR) .+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Phase:
    """What became of a target."""

    target: str
    result: str
    """"passed", "failed", "no tests", "interrupted" or "not run"."""
    counts: str = ""
    """pytest's, such as "2 failed, 40 passed"."""
    failed: Sequence[str] = ()
    """pytest's lines about tests that failed."""
    seconds: float = 0.0


def main() -> int:
    # Ctrl-C reaches make and pytest too, which end by themselves.
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    phases: list[Phase] = []
    for target in sys.argv[1:]:
        if not interrupts:
            print(f"== make {target}", flush=True)
        phase = Phase(target, "not run") if interrupts else run(target)
        if interrupts and phase.result == "failed":
            phase = replace(phase, result="interrupted")
        phases.append(phase)
    print(summary(phases), flush=True)
    if interrupts:
        return 130
    return 1 if any(phase.result == "failed" for phase in phases) else 0


def run(target: str) -> Phase:
    """Make the target."""
    colors = {"PY_COLORS": "1"} if sys.stdout.isatty() else {}
    begun = time.monotonic()
    making = subprocess.Popen(
        [os.environ.get("MAKE", "make"), "--no-print-directory", target],
        stdout=subprocess.PIPE,
        env={**os.environ, **colors},
    )
    assert making.stdout is not None
    output = bytearray()
    while piece := os.read(making.stdout.fileno(), 1 << 16):
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        output += piece
        del output[:-_KEPT_BYTES]
    status = making.wait()
    return phase_of(target, status, output.decode(errors="replace"), time.monotonic() - begun)


def phase_of(target: str, status: int, output: str, seconds: float) -> Phase:
    """What became of a target that ended with this exit status and printed this."""
    plain = _COLOR.sub("", output)
    counts = _COUNTS.findall(plain)
    last = counts[-1] if counts else f"exit status {status}"
    result = "passed" if status == 0 else "failed"
    if status and counts and all(map(_NOTHING_SELECTED.fullmatch, counts)):
        result = "no tests"
    return Phase(target, result, last, _FAILED.findall(plain), seconds)


def summary(phases: Sequence[Phase]) -> str:
    """The lines of all phases, then those of the tests that failed."""
    width = max((len(phase.target) for phase in phases), default=0)
    lines = [
        f"{phase.target:<{width}}  {phase.result:<11}  {phase.seconds:5.0f} s  {phase.counts}".rstrip()
        for phase in phases
    ]
    failed = [f"{phase.target}: {line}" for phase in phases for line in phase.failed]
    return "\n".join(["", "== summary", *lines, *failed])


if __name__ == "__main__":
    sys.exit(main())
