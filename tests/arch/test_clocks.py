"""Timeouts are measured by a clock that cannot be set: the time of day is for dates alone."""

import ast
import re

import pytest

from tests.helpers.source import package_files, text_of

CALLS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("date", "today"),
}
READS = re.compile("|".join([rf"{owner}\.{name}\b" for owner, name in CALLS] + ["from time import"]))
DATES = {
    "atom/benchmarks/agentic/__main__.py": "names of result files",
    "atom/benchmarks/benchmark_serving.py": "names of result files",
    "atom/shared/utils/kept_files.py": "names of files",
    "engine_core/flight_recorder.py": "when a record was written",
    "engine_core/kv_cache/kv_event_publisher.py": "the time in published events",
    "frontend/api/generation/preparation.py": "`created` of a response",
    "frontend/api/models/service.py": "`created` of a model",
    "frontend/status/feed.py": "the axis of charts",
    "frontend/metrics/tracing.py": "the time of spans",
    "frontend/text/chat_template.py": "today's date, for templates",
    "workers/memory/block_files.py": "the age of files",
    "workers/profiler.py": "names of traces",
}


def uses(source: str) -> list[str]:
    """Where the time of day is read."""
    found: list[str] = []
    if not READS.search(source):
        return found  # most files need not be parsed
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in CALLS:
                found.append(f"{owner}.{name}")
            case ast.ImportFrom(module="time", names=names):
                found += [
                    f"from time import {each.name}" for each in names if each.name in ("time", "time_ns")
                ]
    return found


def test_only_dates_come_from_the_time_of_day() -> None:
    reading = {str(path) for path in package_files() if uses(text_of(path))}
    assert reading == DATES.keys()


@pytest.mark.parametrize("code", ["time.time() + 3", "from time import time", "datetime.now()"])
def test_the_search_finds_them(code: str) -> None:
    assert uses(code)
