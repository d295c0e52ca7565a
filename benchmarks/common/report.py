"""A benchmark's result as JSON, with the facts of its run.

benchmark   name of the benchmark
command     how to run it again
hardware, software, date
…           the benchmark's figures
"""

import datetime
import json
import shlex
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.common.machine import hardware, software

__all__ = ["OUTPUT_FLAG", "command_line", "report", "today", "writable_file", "write"]

OUTPUT_FLAG = "--output-json"


def report(
    benchmark: str, gpus: list[str], figures: dict[str, Any], command: str | None = None
) -> dict[str, Any]:
    """The figures after the facts of the run; `gpus` are the names of the GPUs used."""
    return {
        "benchmark": benchmark,
        "command": command or command_line(f"benchmarks.{benchmark}", sys.argv[1:]),
        "hardware": hardware(gpus),
        "software": software(),
        "date": today(),
        **figures,
    }


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write a report to `path`, if given. Raises BenchmarkError."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"{OUTPUT_FLAG} {path}: {error.strerror}") from None
    print(f"written: {path}", file=sys.stderr)


def command_line(module: str, arguments: Sequence[str]) -> str:
    """The command to type, with paths reduced to their last component."""
    words = [f"python -m {module}"]
    skip = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if skip or flag.replace("_", "-") == OUTPUT_FLAG:
            skip = not skip and not equals
            continue
        words.append(shlex.quote(f"{flag}={_named(value)}" if equals else _named(argument)))
    return " ".join(words)


def today() -> str:
    """The date, UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def writable_file(text: str) -> Path:
    """Argument type: a path that can be written, checked before anything is measured."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a directory: name a file")
    return path


def _named(word: str) -> str:
    return Path(word).name if word.startswith(("/", "./", "../", "~/")) else word
