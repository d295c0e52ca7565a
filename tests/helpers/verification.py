"""Parts of a verification: commands with deadlines, what they found, and the report of all."""

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    *("torch", "triton", "triton-rocm", "pytorch-triton-rocm", "amd-aiter", "amd-mori", "amdsmi"),
    *("transformers", "numpy", "pytest"),
)
_FAILURE_CHARACTERS = 8_000
_LAST_LINES = 80


@dataclass(frozen=True)
class Part:
    """One command."""

    name: str
    arguments: tuple[str, ...]
    """Arguments of python; `{tests}` stands for the file of test results that the command writes."""
    deadline_s: float
    environment: dict[str, str] = field(default_factory=dict)
    """Added to that of this process."""


@dataclass(frozen=True)
class Failure:
    """A test, and what it said."""

    test: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """What a part found."""

    part: Part
    ended: str
    """Empty: with status 0; else how."""
    seconds: float
    output: str
    counts: dict[str, int] | None = None
    """Numbers of tests that passed, failed and were skipped; None: the command wrote no results."""
    failures: tuple[Failure, ...] = ()
    skipped: tuple[str, ...] = ()
    """Reasons, each once."""

    @property
    def passed(self) -> bool:
        return not self.ended

    def summary(self) -> str:
        """One line."""
        counted = "" if self.counts is None else ", ".join(f"{n} {name}" for name, n in self.counts.items())
        return f"{self.ended or 'ok'}{f' ({counted})' if counted else ''}, {self.seconds:.0f} s"


def run_part(part: Part, directory: Path) -> Outcome:
    """Run it with its own process group, whose last process is gone when this returns."""
    directory.mkdir(parents=True, exist_ok=True)
    log, tests = directory / "output.txt", directory / "tests.xml"
    command = [sys.executable, *(each.replace("{tests}", str(tests)) for each in part.arguments)]
    begun = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | part.environment,
            start_new_session=True,
        )
        try:
            ended = _how(child.wait(part.deadline_s))
        except subprocess.TimeoutExpired:
            ended = f"did not end within {part.deadline_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    seconds, text = time.monotonic() - begun, log.read_text(encoding="utf-8", errors="replace")
    counts, failures, skipped = _results(tests)
    return Outcome(part, ended, seconds, text, counts, failures, skipped)


def _how(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"status {status}" if status else ""


def _results(path: Path) -> tuple[dict[str, int] | None, tuple[Failure, ...], tuple[str, ...]]:
    """Counts, failures and reasons of skipped tests in the XML that pytest writes."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return None, (), ()
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures, skipped = [], dict[str, None]()
    for case in cases:
        problems = [each for each in case if each.tag in ("failure", "error")]
        reasons = [each.get("message", "") for each in case if each.tag == "skipped"]
        counts["failed" if problems else "skipped" if reasons else "passed"] += 1
        skipped |= dict.fromkeys(reasons)
        text = "\n".join(each.text or each.get("message", "") for each in problems)
        if problems:
            failures.append(
                Failure(f"{case.get('classname')}.{case.get('name')}", text[-_FAILURE_CHARACTERS:])
            )
    return counts, tuple(failures), tuple(skipped)


def report(outcomes: Sequence[Outcome], device: str, begun: datetime, planned: int) -> str:
    """The report as Markdown; `planned` parts in all, the rest of which has not run yet."""
    failed = [each for each in outcomes if not each.passed]
    lines = [
        "# ATOM on ROCm: what holds on this machine",
        "",
        f"{begun:%Y-%m-%d %H:%M} UTC, `--device {device}`, commit {_commit()}.",
        "",
        f"{len(outcomes)} of {planned} parts: {len(outcomes) - len(failed)} passed, {len(failed)} failed.",
        "",
        f"{platform.platform()}, Python {platform.python_version()}; {_versions()}.",
        "",
        "| part | result | seconds |",
        "|---|---|---|",
        *(f"| {each.part.name} | {_cell(each)} | {each.seconds:.0f} |" for each in outcomes),
    ]
    for each in outcomes:
        lines += ["", f"## {each.part.name}", "", f"`python {' '.join(each.part.arguments)}`", ""]
        lines += [f"Skipped: {reason}" for reason in each.skipped]
        for failure in each.failures:
            lines += ["", f"### {failure.test}", "", *_quoted(failure.text)]
        # The failures above say more than what pytest prints, unless it ended before it could write them.
        if each.counts is None or (not each.passed and not each.failures):
            lines += _quoted(
                "\n".join(each.output.splitlines()[-_LAST_LINES:]) if each.ended else each.output
            )
    return "\n".join(lines) + "\n"


def _cell(outcome: Outcome) -> str:
    counts = outcome.counts or {}
    return ", ".join(
        [outcome.ended or "ok", *(f"{number} {name}" for name, number in counts.items() if number)]
    )


def _quoted(text: str) -> list[str]:
    return ["```text", text.replace("```", "'''").strip("\n"), "```"]


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join(found)


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
