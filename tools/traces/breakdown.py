"""One layer of one step as a table: the times of its kernels and modules."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tools.traces.events import TraceError
from tools.traces.steps import Kernel, Step

_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.(.+))?$")
_THE_LAYER_ITSELF = "(layer)"


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of a layer; times in microseconds."""

    module: str
    """Its path within the layer."""
    kernel: str
    duration_us: float
    average_us: float | None = None
    """Average over the layers that run the same kernels; None without such layers."""


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All calls of one kernel in a step."""

    kernel: str
    calls: int
    total_us: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The kernels of one layer of a step, and the totals of the step."""

    label: str
    layer: int
    rows: list[Row]
    averaged: list[int]
    """The layers of the averages."""
    totals: list[KernelTotal]
    """Kernels of the whole step, most time first."""

    @property
    def total_us(self) -> float:
        """Time of the layer."""
        return sum(row.duration_us for row in self.rows)

    def modules(self) -> Iterator[list[Row]]:
        """Consecutive rows of one module."""
        for _, run in groupby(self.rows, key=lambda row: row.module):
            yield list(run)


def break_down(step: Step, layer: int) -> Breakdown:
    """The table of a layer, counted from 0. Raises TraceError if the trace has no such layer."""
    layers = _layers(step.kernels)
    if not layers:
        raise TraceError(
            f"{step.label} names no module of a layer: record with --mark-trace and --torch-profiler-dir"
        )
    if layer not in layers:
        raise TraceError(f"{step.label} has layers {min(layers)} to {max(layers)}, not {layer}")
    rows = layers[layer]
    averaged = _same_layers(layers, layer)
    averages = [sum(times) / len(averaged) for times in zip(*map(_times, averaged.values()), strict=True)]
    if averages:
        rows = [replace(row, average_us=average) for row, average in zip(rows, averages, strict=True)]
    return Breakdown(step.label, layer, rows, list(averaged), kernel_totals(step.kernels))


def kernel_totals(kernels: Sequence[Kernel]) -> list[KernelTotal]:
    """By kernel, most time first."""
    times: dict[str, list[int]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.duration_ns)
    totals = [KernelTotal(name, len(calls), sum(calls) / 1000) for name, calls in times.items()]
    return sorted(totals, key=lambda total: -total.total_us)


def _layers(kernels: Sequence[Kernel]) -> dict[int, list[Row]]:
    layers: dict[int, list[Row]] = defaultdict(list)
    for kernel in kernels:
        if found := _IN_LAYER.search(kernel.module):
            row = Row(found[2] or _THE_LAYER_ITSELF, kernel.name, kernel.duration_ns / 1000)
            layers[int(found[1])].append(row)
    return dict(sorted(layers.items()))


def _same_layers(layers: dict[int, list[Row]], first: int) -> dict[int, list[Row]]:
    """The layers from `first` on if all run the same kernels, else every other one, else none."""
    for stride in (1, 2):
        chosen = {number: rows for number, rows in layers.items() if number in range(first, 1 << 30, stride)}
        if len({tuple((row.module, row.kernel) for row in rows) for rows in chosen.values()}) == 1:
            return chosen
    return {}


def _times(rows: list[Row]) -> list[float]:
    return [row.duration_us for row in rows]
