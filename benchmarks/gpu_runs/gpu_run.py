"""`python -m benchmarks.gpu_runs.gpu_run`: one start of one model, and the rows measured with it.

Started by `benchmarks.gpu` as a process, so that models do not share device memory, and
because the time from the process's start to a ready engine is a row too.
"""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from atom import LLMEngine
from atom.shared.utils.process import read_launch
from benchmarks.common.machine import hardware, software
from benchmarks.common.offline import fixed_length, random_prompts, timed
from benchmarks.gpu_runs.gpu_results import ResultFile, Settings
from benchmarks.gpu_runs.gpu_rows import ROWS, Figure, Measured, Row, measure, shown, unit

_TERMINATED = 143


class Launch(msgspec.Struct, frozen=True):
    """The rows and options of one start."""

    model: str
    path: str
    """The model's directory."""
    options: dict[str, Any]
    results: str
    rows: list[str]
    """A row of Figure.READY is the time of this start."""
    shrink: int
    started: float
    """time.monotonic() when the process was started."""


def main() -> None:
    """Measure and write every row of the launch."""
    launch = read_launch(Launch)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(_TERMINATED))
    try:
        run(launch)
    except (RuntimeError, ValueError, OSError) as error:
        sys.exit(f"error: {launch.model}: {error}")


def run(launch: Launch) -> None:
    """Raises RuntimeError or ValueError if the engine cannot start or fails."""
    file = ResultFile(Path(launch.results), launch.model)
    with LLMEngine(model=launch.path, **launch.options) as engine:
        ready = time.monotonic() - launch.started
        settings = Settings(hardware(engine.gpu_names), software(), launch.options, launch.shrink)
        timer = EngineTimer(engine)
        for row in [ROWS[name].shrunk(launch.shrink) for name in launch.rows]:
            measured = Measured(ready, [ready], []) if row.figure is Figure.READY else measure(row, timer)
            file.add(settings, row.name, measured)
            print(_line(launch.model, row, measured), flush=True)


class EngineTimer:
    """Times greedy requests with random prompts, different in every call."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._draw = np.random.default_rng(0)

    def __call__(self, requests: int, input_len: int, output_len: int) -> float:
        """Seconds until every request has `output_len` tokens; RuntimeError if one ends earlier."""
        prompts = random_prompts(self._engine, self._draw, requests, input_len)
        return timed(self._engine, prompts, [fixed_length(output_len, temperature=0.0)] * requests).seconds


def _line(model: str, row: Row, measured: Measured) -> str:
    times = " ".join(f"{value:.3f}" for value in measured.seconds)
    prompts = "".join(f" {value:.3f}" for value in measured.prompt_seconds)
    taken_off = f", prompts{prompts}" if prompts else ""
    return f"{model}  {row.name}: {shown(row, measured.value)} {unit(row)}  ({times}{taken_off} s)"


if __name__ == "__main__":
    main()
