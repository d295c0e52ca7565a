"""`python -m benchmarks.family_runs.family_run`: the decode steps of one family, in a process of its own."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from atom.shared.config.cli import engine_config_from_kwargs
from atom.shared.config.resolve import resolve
from atom.shared.utils.process import read_launch
from atom.supervisor import Supervisor
from atom_ops import backend
from benchmarks.family_runs.family_configs import FAMILIES
from benchmarks.family_runs.step_bytes import StepBytes, step_bytes
from benchmarks.ranks.decode_step_rank import DecodeStepLaunch, Row, Steps, measure

__all__ = ["FamilyLaunch", "FamilyRow", "row_of"]


class FamilyLaunch(msgspec.Struct, frozen=True):
    """What to measure of one family."""

    family: str
    directory: str
    """Where config.json is written, and `rows.json` with the rows."""
    options: dict[str, Any]
    """Engine options by field name, without the model."""
    rows: list[int]
    context: int
    steps: int
    read_gb_s: float


class FamilyRow(msgspec.Struct, frozen=True):
    """The figures of one decode batch."""

    family: str
    source: str
    rows: int
    context: int
    """Tokens of each request in the middle of the measurement."""
    step_ms: float
    """As in serving: each step is launched while the previous one runs."""
    device_ms: float
    weight_bytes: float
    cache_bytes: float
    floor_ms: float
    ratio: float
    """step_ms / floor_ms."""
    kernels_per_layer: float
    ran_in_torch: list[str]
    """Ops that fell back to torch in any step, those before too."""


def main() -> None:
    """Measure, and write the rows so far after each number of rows."""
    launch = read_launch(FamilyLaunch)
    try:
        run(launch)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        sys.exit(f"error: {launch.family}: {error}")


def run(launch: FamilyLaunch) -> None:
    """Raises ValueError without a GPU or for a refused configuration, RuntimeError if a step fails."""
    family = FAMILIES[launch.family]
    directory = Path(launch.directory)
    (directory / "config.json").write_text(json.dumps(family.config), encoding="utf-8")
    given = engine_config_from_kwargs(model=str(directory), **launch.options)
    with Supervisor() as supervisor:
        checkpoint, capabilities, _ = supervisor.prepare(given.model)
    config = resolve(given, checkpoint, {"model", *launch.options}, capabilities).config
    if config.device.device != "cuda":
        raise ValueError("this measures steps on a GPU, and there is none")
    if config.parallel.tensor_parallel_size * config.parallel.data_parallel_size > 1:
        raise ValueError("this measures one GPU: omit -tp and -dp")
    steps = Steps(DecodeStepLaunch(config, checkpoint, launch.rows, launch.context, launch.steps))
    found = []
    for rows in launch.rows:
        row, _ = measure(steps, rows, launch.context, launch.steps)
        context = launch.context + launch.steps // 2
        moved = step_bytes(steps.worker.model, steps.specs, rows, context, family.experts_per_token)
        found.append(row_of(launch, row, context, moved, backend.ran_in_torch()))
        (directory / "rows.json").write_bytes(msgspec.json.encode(found))


def row_of(
    launch: FamilyLaunch, row: Row, context: int, moved: StepBytes, ran_in_torch: list[str]
) -> FamilyRow:
    """The row with its floor: the time to read these bytes."""
    floor_ms = moved.total / launch.read_gb_s / 1e6
    return FamilyRow(
        launch.family,
        FAMILIES[launch.family].source,
        row.rows,
        context,
        row.ahead_ms,
        row.device_ms,
        round(moved.weights),
        round(moved.cache),
        round(floor_ms, 4),
        round(row.ahead_ms / floor_ms, 3),
        row.kernels_per_layer,
        ran_in_torch,
    )


if __name__ == "__main__":
    main()
