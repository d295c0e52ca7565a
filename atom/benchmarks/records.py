"""Results that are kept: one JSON file each, under docs/benchmarks, which says by itself what was run.

Each is what a benchmark wrote with --output-json (see `report`), or a serving benchmark's result with
the same facts put in front. The GPU benchmark keeps files of its own kind there (see `gpu_results`).
"""

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.benchmarks.serving.errors import BenchmarkError

__all__ = ["FACTS", "KINDS", "Record", "completed", "read_json", "read_record"]

FACTS = ("command", "hardware", "software", "date")
KINDS = ("serving", "throughput", "latency", "kernels", "scheduler", "accuracy")
_SERVING_KEYS = {"backend", "model_id", "duration", "completed", "request_throughput"}
_DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "latencies")
"""One entry for each request or iteration: too much to keep, and in the figures anyway."""


@dataclass(frozen=True)
class Record:
    """One kept result."""

    name: str
    kind: str
    facts: dict[str, str]
    """`FACTS`, and for the serving benchmark `server`: the command that it ran against."""
    figures: dict[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """Raises BenchmarkError for a file that holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise BenchmarkError(f"{path} holds no result of a benchmark")
    return content


def completed(result: Mapping[str, Any], said: Mapping[str, str | None], where: str) -> dict[str, Any]:
    """What is kept of a result. Raises BenchmarkError.

    `said` are facts of the command line; a result's own stand, and one that says other things is
    no longer what was measured.
    """
    if result.get("benchmark") not in KINDS:
        if not result.keys() >= _SERVING_KEYS:
            raise BenchmarkError(f"{where} holds no result of a benchmark: {', '.join(KINDS)}")
        result = {**_dated(result), "benchmark": "serving"}
    wanted = [*FACTS, "server"] if result["benchmark"] == "serving" else list(FACTS)
    facts: dict[str, str] = {}
    for name in wanted:
        own, given = result.get(name), said.get(name)
        if own and given and own != given:
            raise BenchmarkError(f"{where} says {name} {own!r}: leave --{name} out")
        if not (own or given):
            raise BenchmarkError(f"{where} does not say its {name}: give --{name}")
        facts[name] = str(own or given)
    for name in said.keys() - wanted:
        if said[name]:
            raise BenchmarkError(f"--{name} does not belong to a {result['benchmark']} result")
    figures = {name: value for name, value in result.items() if name not in facts and name not in _DETAILS}
    return {"benchmark": figures.pop("benchmark"), **facts, **figures}


def read_record(path: Path) -> Record:
    """Raises BenchmarkError."""
    kept = completed(read_json(path), {}, str(path))
    kind = kept.pop("benchmark")
    facts = {name: kept.pop(name) for name in (*FACTS, "server") if name in kept}
    return Record(path.stem, kind, facts, kept)


def _dated(result: Mapping[str, Any]) -> dict[str, Any]:
    """The serving benchmark's date as the others write it."""
    try:
        moment = datetime.datetime.strptime(str(result.get("date")), "%Y%m%d-%H%M%S")
    except ValueError:
        return dict(result)
    return {**result, "date": moment.date().isoformat()}
