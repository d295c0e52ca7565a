"""The GPU benchmark's results as text: a table on the terminal and a section of the page of all results.

Other engines' figures, floors and targets are in recorded.json, with their sources.
"""

import shlex
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu_runs.gpu_results import Content, Entry
from benchmarks.gpu_runs.gpu_rows import ROWS, Row, shown, unit

COMMAND = "python -m benchmarks.gpu"
_RECORDED = Path(__file__).parents[1] / "pages/recorded.json"


class Peer(msgspec.Struct, frozen=True):
    """How another engine's figures were measured."""

    version: str
    date: str
    hardware: str
    software: str
    settings: str


class Floors(msgspec.Struct, frozen=True):
    """The hardware's rates that give the floors."""

    read_gb_per_s: float
    matmul_tflops: float
    derivation: str


class Comparison(msgspec.Struct, frozen=True):
    """What one figure is compared with, in the same unit."""

    vllm: float | None = None
    floor: float | None = None
    mark: float | None = None
    """This engine's target."""
    aim: float | None = None


class Recorded(msgspec.Struct, frozen=True):
    """recorded.json: `models` maps row names to a Comparison."""

    vllm: Peer
    floors: Floors
    models: dict[str, dict[str, Comparison]]


@cache
def recorded() -> Recorded:
    """The figures of recorded.json."""
    return msgspec.json.decode(_RECORDED.read_bytes(), type=Recorded)


def terminal_table(results: dict[str, Content]) -> str:
    """One block of lines for each model."""
    header = ["", *_HEADER]
    blocks = [[[model, *[""] * len(_HEADER)], *_lines(model, content)] for model, content in results.items()]
    lines = [header, *(line for block in blocks for line in block)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def gpu_section(results: dict[str, Content]) -> str:
    """The section of docs/measurements/benchmarks.md with the results by model."""
    about = recorded()
    parts = [
        "## Offline engine on a GPU",
        f"Measured by `{COMMAND}` (`make bench-gpu`).",
        _INTRODUCTION,
        *(_section(model, content) for model, content in results.items()),
        f"**vLLM {about.vllm.version}**: measured {about.vllm.date} on {about.vllm.hardware}; "
        f"{about.vllm.software}. {about.vllm.settings}.",
        f"**Floor**: {about.floors.derivation}",
        "**Mark**: what this engine is to reach at least; in brackets what it aims for.",
    ]
    return "\n\n".join(parts)


_HEADER = ["ATOM", "unit", "vLLM", "ATOM against vLLM", "floor", "mark"]
_INTRODUCTION = """\
Offline engine, greedy, end of sequence ignored; prompts are random token ids, different in every
repetition. One untimed run of the same shape comes before each row. The time is the wall clock around
`LLMEngine.generate`; figures are medians (of 3, prefill of 2, first token of 5). A workload is named
*requests x prompt tokens/generated tokens*. A step's time is the difference of two runs,
(T(n tokens) - T(1 token)) / (n - 1); throughput counts generated tokens over the whole time, prompts
included. With random weights nothing is read from disk; these checkpoints have no tokenizer, so no text
is detokenized, where vLLM's figures include it. *Engine ready* is the time from the start of the process
until it can take a request; with warm caches it is a second start on the same machine."""


def _section(model: str, content: Content) -> str:
    settings = content.settings
    facts = [
        f"- Hardware: {settings.hardware}",
        f"- Software: {settings.software}",
        f"- Command: `{_command(model, settings.options, settings.shrink)}`",
        "- For a single row add `--rows NAME --fresh`",
    ]
    if settings.shrink != 1:
        facts.append(
            f"- **A trial: requests and lengths divided by {settings.shrink}; the figures mean nothing.**"
        )
    columns = ["row", "", *_HEADER, "date"]
    rule = ["---", "---", "---:", "---", "---:", "---:", "---:", "---:", "---"]
    entries = _known(content)
    cells = [
        [f"`{row.name}`", *line, entry.measured]
        for (row, entry), line in zip(entries, _lines(model, content), strict=True)
    ]
    table = "\n".join("| " + " | ".join(line) + " |" for line in (columns, rule, *cells))
    return "\n\n".join([f"### {model}", "\n".join(facts), table])


def _lines(model: str, content: Content) -> list[list[str]]:
    """Title and the cells of _HEADER for each row."""
    shrunk = content.settings.shrink != 1
    comparisons = {} if shrunk else recorded().models.get(model, {})
    return [_line(row, entry, comparisons.get(row.name, Comparison())) for row, entry in _known(content)]


def _line(row: Row, entry: Entry, comparison: Comparison) -> list[str]:
    def cell(value: float | None) -> str:
        return "" if value is None else shown(row, value)

    mark = cell(comparison.mark)
    if comparison.aim is not None:
        mark += f" ({cell(comparison.aim)})"
    ratio = "" if comparison.vllm is None else f"{speed_up(row, entry.value, comparison.vllm):.2f}x"
    return [
        row.title,
        shown(row, entry.value),
        unit(row),
        cell(comparison.vllm),
        ratio,
        cell(comparison.floor),
        mark,
    ]


def speed_up(row: Row, value: float, other: float) -> float:
    """How many times as fast `value` is as `other`."""
    return other / value if row.figure.less_is_better else value / other


def _known(content: Content) -> Iterable[tuple[Row, Entry]]:
    """The measured rows in the order of the table."""
    return [(row, content.rows[name]) for name, row in ROWS.items() if name in content.rows]


def _command(model: str, options: dict[str, Any], shrink: int) -> str:
    words = [COMMAND, "--models", model, *(word for item in options.items() for word in _flag(*item))]
    return " ".join([words[0], *map(shlex.quote, words[1:]), *(["--shrink", str(shrink)] * (shrink != 1))])


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]
