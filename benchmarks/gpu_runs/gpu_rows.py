"""The rows of the GPU benchmark: their workloads, and the arithmetic from times to figures.

Independent of the engine: a row is timed by a function that runs `requests` prompts of `input_len`
tokens to `output_len` tokens each.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

Timer = Callable[[int, int, int], float]
"""Seconds for (requests, input_len, output_len), from the first submission to the last token."""


class Figure(StrEnum):
    """The kind of a row's figure, which decides its unit."""

    STEP = "ms/step"
    """(T(output_len) - T(1)) / (output_len - 1): a decode step, without the prompts."""
    OUTPUT = "output tok/s"
    """Generated tokens over the whole time, prompts included."""
    PROMPT = "prompt tok/s"
    FIRST_TOKEN = "ms"
    READY = "s"
    """From the start of the process until it can take a request."""

    @property
    def less_is_better(self) -> bool:
        return self not in (Figure.OUTPUT, Figure.PROMPT)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    title: str
    figure: Figure
    requests: int = 0
    input_len: int = 0
    output_len: int = 1
    repetitions: int = 3

    def shrunk(self, divisor: int) -> "Row":
        """The row with fewer and shorter requests, to test the script on a slow machine."""
        if self.figure is Figure.READY or divisor == 1:
            return self
        return replace(
            self,
            requests=max(self.requests // divisor, 1),
            input_len=max(self.input_len // divisor, 1),
            output_len=self.output_len if self.output_len == 1 else max(self.output_len // divisor, 2),
        )


@dataclass(frozen=True)
class Measured:
    """A figure and the times that it was computed from."""

    value: float
    seconds: list[float]
    """Time of each repetition."""
    prompt_seconds: list[float]
    """Times with a single generated token, where these are subtracted."""


READY_FIRST = Row("ready-first", "engine ready, first start of this run", Figure.READY)
READY = Row("ready", "engine ready, warm caches", Figure.READY)
TIMED = (
    Row("batch-1", "batch 1, 128/256, each token", Figure.STEP, 1, 128, 256),
    Row("batch-64", "batch 64, 32/129, each step", Figure.STEP, 64, 32, 129),
    Row("batch-256", "batch 256, 32/129, each step", Figure.STEP, 256, 32, 129),
    Row("64x1024-256", "64 x 1024/256", Figure.OUTPUT, 64, 1024, 256),
    Row("256x512-256", "256 x 512/256", Figure.OUTPUT, 256, 512, 256),
    Row("prefill-64x4096", "prefill 64 x 4096", Figure.PROMPT, 64, 4096, 1, 2),
    Row("first-token-128", "first token, batch 1, 128", Figure.FIRST_TOKEN, 1, 128, 1, 5),
    Row("first-token-1024", "first token, batch 1, 1024", Figure.FIRST_TOKEN, 1, 1024, 1, 5),
    Row("first-token-4096", "first token, batch 1, 4096", Figure.FIRST_TOKEN, 1, 4096, 1, 5),
)
ROWS = {row.name: row for row in (*TIMED, READY_FIRST, READY)}


def measure(row: Row, seconds: Timer) -> Measured:
    """Run a row: one untimed run of the same shape, then the repetitions."""
    seconds(row.requests, row.input_len, row.output_len)
    whole = []
    prompts = []
    for _ in range(row.repetitions):
        if row.figure is Figure.STEP:
            prompts.append(seconds(row.requests, row.input_len, 1))
        whole.append(seconds(row.requests, row.input_len, row.output_len))
    return Measured(figure_of(row, whole, prompts), whole, prompts)


def figure_of(row: Row, whole: list[float], prompts: list[float]) -> float:
    """The row's figure, in its unit, from the medians of the times."""
    time = statistics.median(whole)
    match row.figure:
        case Figure.STEP:
            return (time - statistics.median(prompts)) / (row.output_len - 1) * 1e3
        case Figure.OUTPUT:
            return row.requests * row.output_len / time
        case Figure.PROMPT:
            return row.requests * row.input_len / time
        case Figure.FIRST_TOKEN:
            return time * 1e3
        case Figure.READY:
            return time


def shown(row: Row, value: float) -> str:
    """`value` with a sensible number of digits."""
    if not row.figure.less_is_better:
        return f"{value:,.0f}"
    return f"{value:.1f}" if row.figure in (Figure.READY, Figure.FIRST_TOKEN) else f"{value:.3f}"


def unit(row: Row) -> str:
    """The unit in the table."""
    return "ms/token" if row.figure is Figure.STEP and row.requests == 1 else row.figure.value
