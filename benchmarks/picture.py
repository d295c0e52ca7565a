"""Draws throughput against interactivity, with vLLM's, from the kept results.

    python -m benchmarks.picture

A panel per model. Decode: the rows `batch-1`, `batch-64` and `batch-256` of `make bench-gpu`. Serving:
kept results of `benchmark_serving` on one GPU with the lengths that recorded.json has vLLM's figures
for. A panel needs figures of both engines. The same results give the same bytes.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.config.cli import CommandLineParser
from benchmarks.common.arguments import single_line_errors
from benchmarks.gpu_runs.gpu_document import Peer, recorded
from benchmarks.gpu_runs.gpu_results import ResultFile
from benchmarks.gpu_runs.gpu_rows import TIMED, Figure
from benchmarks.pages.chart import Curve, Panel, Point, svg
from benchmarks.pages.records import Record, read_json, read_record

__all__ = ["main", "panels", "picture"]

_RECORDED = Path(__file__).parent / "pages/recorded.json"
_SEVERAL_GPUS = re.compile(r"(?:-tp|--tensor[-_]parallel[-_]size)[ =](?!1\b)")


class ServedPoint(msgspec.Struct, frozen=True):
    """A serving run of vLLM at one concurrency."""

    concurrency: int
    output_throughput: float
    median_tpot_ms: float


class RecordedServing(msgspec.Struct, frozen=True):
    """vLLM's serving runs, by model."""

    settings: str
    input_len: int
    output_len: int
    models: dict[str, list[ServedPoint]]


class _Recorded(msgspec.Struct, frozen=True):
    vllm: Peer
    serving: RecordedServing


@dataclass(frozen=True)
class _Results:
    """The kept results on the hardware that vLLM's figures are from."""

    gpu: dict[str, dict[str, float]]
    """Model to row to value."""
    served: list[Record]


def main() -> None:
    parser = CommandLineParser(
        prog="benchmarks.picture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--results", type=Path, default=Path("docs/measurements/results"), help="folder of the kept results"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="SVG file to write; throughput-interactivity.svg in the folder when absent",
    )
    args = parser.parse_args()
    path = args.output or args.results / "throughput-interactivity.svg"
    with single_line_errors():
        path.write_text(picture(args.results), encoding="utf-8")
    print(f"written: {path}")


def picture(folder: Path) -> str:
    """The SVG text. Raises BenchmarkError if no model has figures of both engines."""
    found = panels(folder)
    if not found:
        raise BenchmarkError(f"{folder} has no results of a model that vLLM's figures are recorded for")
    source = msgspec.json.decode(_RECORDED.read_bytes(), type=_Recorded)
    hardware = source.vllm.hardware.partition(",")[0]
    notes = [
        f"One {hardware}, random weights in bfloat16. Labels are batch sizes (decode) or concurrencies "
        "(serving); up and right is better.",
        f"ATOM: results in docs/measurements. vLLM {source.vllm.version}: measured {source.vllm.date}, "
        "settings in docs/measurements/benchmarks.md.",
    ]
    if any(", serving" in panel.title for panel in found):
        notes.append(f"vLLM's serving runs: {source.serving.settings}.")
    return svg(found, notes)


def panels(folder: Path) -> list[Panel]:
    """Decode panels, then serving panels, in the order of recorded.json."""
    source = msgspec.json.decode(_RECORDED.read_bytes(), type=_Recorded)
    results = _read(folder, source.vllm.hardware.partition(",")[0])
    return [*_decode_panels(results), *_serving_panels(results, source.serving)]


def _read(folder: Path, hardware: str) -> _Results:
    gpu = {}
    served = []
    for path in sorted(folder.glob("*.json")):
        if "benchmark" in read_json(path):
            record = read_record(path)
            if record.kind == "serving" and record.facts["hardware"].startswith(hardware):
                served.append(record)
        elif content := ResultFile(folder, path.stem).read():
            settings = content.settings
            one_gpu = settings.options.get("tensor_parallel_size", 1) == 1
            if settings.hardware.startswith(hardware) and settings.shrink == 1 and one_gpu:
                gpu[path.stem] = {name: entry.value for name, entry in content.rows.items()}
    return _Results(gpu, served)


def _decode_panels(results: _Results) -> Iterator[Panel]:
    rows = [row for row in TIMED if row.figure is Figure.STEP]
    for model, comparisons in recorded().models.items():
        ours = []
        theirs = []
        for row in rows:
            value = results.gpu.get(model, {}).get(row.name)
            other = comparisons.get(row.name)
            if value is not None and other is not None and other.vllm is not None:
                ours.append(_decode_point(row.requests, value))
                theirs.append(_decode_point(row.requests, other.vllm))
        if ours:
            yield Panel(f"{model}, decode", [Curve("ATOM", ours), Curve("vLLM", theirs)])


def _decode_point(batch_size: int, step_ms: float) -> Point:
    return Point(str(batch_size), 1e3 / step_ms, batch_size * 1e3 / step_ms)


def _serving_panels(results: _Results, source: RecordedServing) -> Iterator[Panel]:
    for model, runs in source.models.items():
        ours = sorted(
            (
                ServedPoint(
                    record.figures["max_concurrency"],
                    record.figures["output_throughput"],
                    record.figures["median_tpot_ms"],
                )
                for record in results.served
                if _is_comparable(record, model, source)
            ),
            key=lambda run: run.concurrency,
        )
        if ours:
            title = f"{model}, serving {source.input_len} in, {source.output_len} out"
            curves = [Curve("ATOM", _served_points(ours)), Curve("vLLM", _served_points(runs))]
            yield Panel(title, curves)


def _is_comparable(record: Record, model: str, source: RecordedServing) -> bool:
    """Whether the run had the model, the lengths, one GPU and a fixed concurrency."""
    figures = record.figures
    return (
        str(figures["model_id"]).rstrip("/").split("/")[-1] == model
        and figures["request_rate"] == "inf"
        and figures["max_concurrency"] is not None
        and "median_tpot_ms" in figures
        and figures["total_input_tokens"] == source.input_len * figures["completed"]
        and figures["total_output_tokens"] == source.output_len * figures["completed"]
        and not _SEVERAL_GPUS.search(record.facts["server"])
    )


def _served_points(runs: list[ServedPoint]) -> list[Point]:
    return [Point(str(run.concurrency), 1e3 / run.median_tpot_ms, run.output_throughput) for run in runs]


if __name__ == "__main__":
    main()
