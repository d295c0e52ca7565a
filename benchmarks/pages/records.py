"""Recorded results: one JSON file each under docs/measurements/results, with the facts of its run.

Each is a report written with --output-json (see `report`), or a serving benchmark's result with the
same facts added. The GPU benchmark's files there have their own format (see `gpu_results`).
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
KINDS = ("serving", "throughput", "latency", "kernels", "all_reduce", "decode_step", "scheduler", "accuracy")
_SERVING_KEYS = {"backend", "model_id", "duration", "completed", "request_throughput"}
_DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "latencies")
"""Lists with an entry for each request or iteration; left out, because the figures summarise them."""


@dataclass(frozen=True)
class Record:
    """One recorded result."""

    name: str
    kind: str
    facts: dict[str, str]
    """`FACTS`, and for the serving benchmark `server`: the server's command."""
    figures: dict[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises BenchmarkError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise BenchmarkError(f"{path} holds no result of a benchmark")
    return content


def completed(result: Mapping[str, Any], said: Mapping[str, str | None], where: str) -> dict[str, Any]:
    """The record of a result. Raises BenchmarkError.

    `said` are facts from the command line, for those that the result lacks; a fact that contradicts
    the result is an error.
    """
    if result.get("benchmark") not in KINDS:
        if not result.keys() >= _SERVING_KEYS:
            raise BenchmarkError(f"{where} holds no result of a benchmark: {', '.join(KINDS)}")
        result = {**_dated(result), "benchmark": "serving"}
    wanted = [*FACTS, "server"] if result["benchmark"] == "serving" else list(FACTS)
    facts: dict[str, str] = {}
    for name in wanted:
        own = result.get(name)
        given = said.get(name)
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
    """The serving benchmark's date in the format of the others."""
    try:
        moment = datetime.datetime.strptime(str(result.get("date")), "%Y%m%d-%H%M%S")
    except ValueError:
        return dict(result)
    return {**result, "date": moment.date().isoformat()}
