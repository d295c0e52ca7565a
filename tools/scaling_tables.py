"""The tables of docs/operate/scaling.md, computed by the roofline and the simulation."""

import json
from collections.abc import Iterator
from pathlib import Path

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.simulation.decoder import decoder
from benchmarks.simulation.engines import Cost, EngineSettings
from benchmarks.simulation.requests import Workload, requests
from benchmarks.simulation.roofline import H200, Layout, Roofline, Work
from benchmarks.simulation.simulate import Simulation

__all__ = ["scaling_tables"]

_RESULTS = Path(__file__).resolve().parents[1] / "docs/measurements/results"
_CONTEXT = 2048
_LIMIT_S = 0.05
_GPUS = (8, 64, 512)
# docs/measurements/steps.md: milliseconds of a step by rows, where no result is kept.
_MEASURED_STEPS = {
    ("Qwen3-8B", 2): {1: 2.43, 64: 3.25, 256: 5.37},
    ("Qwen3-30B-A3B", 1): {1: 2.73, 64: 15.93, 256: 17.76},
}


def scaling_tables() -> str:
    """All tables, with their headings."""
    parts = [
        "### Bytes that a GPU sends for a token and layer",
        _table(["model", *_BYTES_LAYOUTS], _bytes_rows()),
        f"### Decoding with {_CONTEXT:,} tokens of context, at most {_LIMIT_S * 1e3:.0f} ms a token",
        _table(
            _EXPECTED,
            _expected_rows(),
        ),
        "### Predicted and measured: steps on an H200",
        _table(["model", "rows", "predicted, ms", "measured, ms", "difference"], _step_rows()),
        "### Predicted and measured: whole runs, simulated with the real scheduler",
        _table(["model", "run", "predicted, tokens/s", "measured, tokens/s", "difference"], _run_rows()),
    ]
    return "\n\n".join(parts)


def _table(header: list[str], rows: Iterator[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


# Bytes

_BYTES_LAYOUTS = {
    "DP": Layout(1, 8),
    "TP 2": Layout(2),
    "TP 8": Layout(8),
    "EP 8": Layout(1, 8, spread=True),
    "EP 64": Layout(1, 64, spread=True),
    "EP 256": Layout(1, 256, spread=True),
}


def _bytes_rows() -> Iterator[list[str]]:
    for name in ("Qwen3-8B", "Qwen3-30B-A3B", "DeepSeek-V3"):
        model = decoder(name)
        cells = []
        for layout in _BYTES_LAYOUTS.values():
            lines = Roofline(model, H200, layout)
            if not layout.spread:
                cells.append(f"{lines.tp_bytes():,.0f}")
            elif layout.expert_ranks <= model.shape.experts:
                cells.append(f"{lines.ep_bytes():,.0f} to {lines.ranks_of_a_token():.1f} ranks")
            else:
                cells.append("-")
        yield [name, *cells]


# What to expect

_EXPECTED = [
    *("GPUs", "model", "layout", "weights, GB", "rows on a GPU", "ms/token", "tokens/s of a GPU"),
    *("collectives", "one row on each engine, ms/token"),
]


def _layouts(model: str, gpus: int) -> Iterator[tuple[str, Layout]]:
    """Names and layouts; of several equal groups of GPUs that share experts, one."""
    yield "DP", Layout(1, gpus)
    yield "TP 8 x DP", Layout(8, gpus // 8)
    if experts := decoder(model).shape.experts:
        size = min(gpus, experts)
        groups = "" if size == gpus else f", {gpus // size} groups"
        yield f"EP {size}{groups}", Layout(1, size, spread=True)
        if size > 8:
            yield f"TP 8, EP {size}{groups}", Layout(8, size // 8, spread=True)


def _expected_rows() -> Iterator[list[str]]:
    for gpus in _GPUS:
        for model in ("Qwen3-8B", "Qwen3-30B-A3B", "DeepSeek-V3"):
            for name, layout in _layouts(model, gpus):
                yield [str(gpus), model, name, *_expected(Roofline(decoder(model), H200, layout))]


def _expected(roofline: Roofline) -> list[str]:
    """Weights, the largest batch on a GPU within the limits, and what it gives."""
    layout = roofline.layout
    weights = f"{roofline.weight_bytes() / 1e9:.0f}"
    try:
        held = roofline.kv_tokens() // _CONTEXT
    except BenchmarkError:
        return [weights, "does not fit", *["-"] * 4]
    best = None
    for rows in (1 << power for power in range(11)):
        work = _decoding(rows * layout.tp)
        if rows * layout.tp > held or roofline.seconds(work) > _LIMIT_S:
            break
        best = rows, work
    alone = f"{roofline.seconds(_decoding(1)) * 1e3:.1f}"
    if best is None:
        return [weights, "none", "-", "-", "-", alone]
    rows, work = best
    seconds = roofline.seconds(work)
    share = roofline.collective_seconds(work.tokens) / seconds
    return [weights, f"{rows:,}", f"{seconds * 1e3:.1f}", f"{rows / seconds:,.0f}", f"{share:.0%}", alone]


def _decoding(rows: int) -> Work:
    return Work(rows=rows, context=rows * _CONTEXT)


# Predicted and measured


def _kept(model: str, row: str) -> float:
    found = json.loads((_RESULTS / f"{model}.json").read_text(encoding="utf-8"))["rows"]
    return float(found[row]["value"])


def _step_rows() -> Iterator[list[str]]:
    names = ("Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B")
    measured = {(name, 1): {rows: _kept(name, f"batch-{rows}") for rows in (1, 64, 256)} for name in names}
    for (name, tp), steps in (measured | _MEASURED_STEPS).items():
        roofline = Roofline(decoder(name), H200, Layout(tp))
        for rows, step in steps.items():
            context = 256 if rows == 1 else 97  # half way through the outputs of these rows
            predicted = roofline.seconds(Work(rows=rows, context=rows * context)) * 1e3
            title = name if tp == 1 else f"{name}, TP {tp}"
            yield [title, str(rows), f"{predicted:.2f}", f"{step:.2f}", f"{predicted / step - 1:+.0%}"]


def _run_rows() -> Iterator[list[str]]:
    rows = [*_gpu_runs(), *_cpu_runs()]
    for name, (count, prompt, output), predicted, measured in rows:
        run = f"{count} x {prompt:,} in, {output} out"
        yield [name, run, f"{predicted:,.0f}", f"{measured:,.0f}", f"{predicted / measured - 1:+.0%}"]


def _gpu_runs() -> Iterator[tuple[str, tuple[int, int, int], float, float]]:
    for name in ("Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B"):
        for count, prompt, output in ((64, 1024, 256), (256, 512, 256)):
            measured = _kept(name, f"{count}x{prompt}-{output}")
            cost = Roofline(decoder(name), H200, Layout()).seconds
            predicted = _simulated(cost, 16384, (count, prompt, output))
            yield f"{name}, H200", (count, prompt, output), predicted, measured


def _cpu_runs() -> Iterator[tuple[str, tuple[int, int, int], float, float]]:
    """Over HTTP (docs/measurements/steps.md). A single stream gives the seconds of a step and of a token."""
    token = (0.29 - 0.046) / (128 - 1)
    step = 0.046 - token
    for shape, measured in (((16, 128, 64), 99.0), ((64, 32, 32), 182.0)):
        predicted = _simulated(lambda work, all_tokens: step + token * work.tokens, 2048, shape)
        yield "SmolLM2-135M, two CPU cores", shape, predicted, measured


def _simulated(cost: Cost, budget: int, shape: tuple[int, int, int]) -> float:
    """Output tokens per second of requests that start together: (how many, prompt, output)."""
    count, prompt, output = shape
    settings = EngineSettings(1024, budget, count * (prompt + output) // 16 + count, 16, False)
    workload = Workload(count, input_len=prompt, output_len=output)
    return Simulation(settings, cost).run(requests(workload), count).output_tokens_per_second
