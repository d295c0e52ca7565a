"""Times every op with each of its providers, and compares it with the device's roofline.

    python -m benchmarks.kernels --model Qwen3-0.6B --shapes decode-1 decode-64 prefill-1024

First the device's rates are measured: bytes per second of a copy, and operations per second of a GEMM.
An op's floor is the time of its bytes or its operations at these rates, whichever is longer; *of
roofline* is the floor divided by the op's time. It can exceed 100 %, because reads are faster than
copies and caches faster than memory.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from tqdm import tqdm

from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.config.cli import CommandLineParser
from atom_ops import backend
from atom_ops.op import REFERENCE, REGISTRY, Op, Provider
from atom_ops.triton_impl.hardware import target
from atom_ops.weights.samples import Format
from benchmarks.common.arguments import add_output_flag, single_line_errors
from benchmarks.common.report import report, write
from benchmarks.kernel_runs.kernel_clock import Clock, Roofline, measure_roofline
from benchmarks.kernel_runs.kernel_shapes import MODELS, STEPS, ModelShape, StepShape, model_shape
from benchmarks.kernel_runs.kernel_work import Inputs, Work, bytes_of, works

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_COLD_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
_MOST_COPIES = 32
_SHAPES = ("decode-1", "decode-64", "prefill-1024")


@dataclass(frozen=True)
class KernelRun:
    """One provider with one call of its op."""

    op: Op[..., Any]
    provider: Provider
    step: StepShape
    work: Work

    @property
    def provider_name(self) -> str:
        return "composed" if self.op.composed and self.provider.name == REFERENCE else self.provider.name


def main() -> None:
    args = _parser().parse_args()
    with single_line_errors():
        device = _device(args.device)
        dtype = DTYPES[args.dtype or ("float32" if device.type == "cpu" else "bfloat16")]
        shape = model_shape(args.model)
        backend.resolve(device)
        runs = list(select(args.ops, shape, [STEPS[name] for name in args.shapes], dtype, device))
        bench = Bench(device, dtype, Clock(device, args.seconds), args.weights)
        print(bench.line(), flush=True)
        rows = bench.run(runs)
        gpus = [torch.cuda.get_device_name(device)] if device.type == "cuda" else []
        result = report("kernels", gpus, {"model": args.model, **bench.facts(), "rows": rows})
        print(text(result))
        write(args.output_json, result)


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=MODELS[-1], help=f"{', '.join(MODELS)}, or a directory with config.json")
    add("--shapes", nargs="+", choices=list(STEPS), default=list(_SHAPES), help="steps: rows or tokens")
    add(
        "--ops", nargs="+", choices=sorted(REGISTRY), default=sorted(REGISTRY), help="which ops", metavar="OP"
    )
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--dtype", choices=list(DTYPES), help="of the arguments; float32 on a CPU, else bfloat16")
    add("--weights", choices=get_args(Format), default="plain", help="quantization of the linear layers")
    add("--seconds", type=_seconds, default=0.2, help="how long to time each call")
    add_output_flag(parser)
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 60")
    return seconds


def _device(name: str) -> torch.device:
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise BenchmarkError("--device cuda: torch sees no GPU here; use --device cpu")
    if target.INTERPRETED:
        raise BenchmarkError("TRITON_INTERPRET=1: the time of interpreted kernels is meaningless; unset it")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def select(
    ops: list[str], model: ModelShape, steps: list[StepShape], dtype: torch.dtype, device: torch.device
) -> Iterator[KernelRun]:
    """Every provider that runs on the device with every call of its op, without duplicates."""
    for name in sorted(ops):
        op = REGISTRY[name]
        seen: set[str] = set()
        for step in steps:
            for work in works(op, model, step, dtype):
                if work.label in seen:
                    continue
                seen.add(work.label)
                for provider in op.providers.values():
                    if provider.supported(device):
                        yield KernelRun(op, provider, step, work)


class Bench:
    """Measures on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, clock: Clock, weights: Format = "plain"):
        """`weights`: of the linear layers."""
        self._device = device
        self._weights = weights
        self._dtype = dtype
        self._clock = clock
        self.roofline: Roofline = measure_roofline(clock, device, dtype)

    def line(self) -> str:
        """The device's rates as a line of text."""
        dtype = str(self._dtype)[6:]
        threads = torch.get_num_threads()
        where = f"CPU, {threads} threads" if self._device.type == "cpu" else torch.cuda.get_device_name()
        return (
            f"{where}: copies {self.roofline.bytes_per_s / 1e9:.1f} GB/s, "
            f"multiplies {self.roofline.flops_per_s / 1e12:.3f} TFLOP/s in {dtype}"
        )

    def facts(self) -> dict[str, Any]:
        """The facts of the report that all rows share."""
        return {
            "device": self._device.type,
            "dtype": str(self._dtype)[6:],
            "weights": self._weights,
            "threads": torch.get_num_threads(),
            "copy_bytes_per_s": self.roofline.bytes_per_s,
            "matmul_flops_per_s": self.roofline.flops_per_s,
        }

    @torch.inference_mode()
    def run(self, runs: list[KernelRun]) -> list[dict[str, Any]]:
        """A row for each run that the provider supports and that fits in memory."""
        rows = []
        for one in tqdm(runs, desc="kernels", leave=False, disable=None):
            try:
                row = self._row(one)
            except torch.OutOfMemoryError:
                print(f"left out: {one.op.name} {one.work.label}: out of memory", file=sys.stderr)
                continue
            if row is not None:
                rows.append(row)
        return rows

    def _row(self, one: KernelRun) -> dict[str, Any] | None:
        given = self._arguments(one)
        mine = self._prepared(one, given)
        if one.provider.supports is not None and not one.provider.supports(*mine):
            return None
        moved = one.work.moved
        result = one.provider.function(*mine)
        if moved is None:
            moved = bytes_of(given) + bytes_of(result)
        calls = self._calls(one, mine, moved)
        timing = self._clock.time(calls)
        row = {
            "op": one.op.name,
            "provider": one.provider_name,
            "step": one.step.name if one.work.flops is not None else "",
            "shape": one.work.label,
            "microseconds": timing.median * 1e6,
            "best_microseconds": timing.best * 1e6,
            "timed": timing.how,
        }
        flops = one.work.flops
        if flops is None:
            return row
        return row | {
            "bytes": moved,
            "flops": flops,
            "bound": self.roofline.bound(moved, flops),
            "floor_microseconds": self.roofline.floor(moved, flops) * 1e6,
            "of_roofline": self.roofline.floor(moved, flops) / timing.median,
        }

    def _calls(self, one: KernelRun, first: tuple[Any, ...], moved: float) -> list[Callable[[], object]]:
        """The call with as many sets of arguments as exceed the caches."""
        size = max(moved, 1.0)
        room = torch.cuda.mem_get_info()[0] / 2 / size if self._device.type == "cuda" else _MOST_COPIES
        copies = int(min(_COLD_BYTES[self._device.type] // size, _MOST_COPIES, room))
        sets = [first, *(self._prepared(one, self._arguments(one)) for _ in range(copies - 1))]
        return [partial(one.provider.function, *arguments) for arguments in sets]

    def _arguments(self, one: KernelRun) -> tuple[Any, ...]:
        generator = torch.Generator(self._device).manual_seed(1)
        return one.work.make(Inputs(self._dtype, self._device, generator, self._weights))

    def _prepared(self, one: KernelRun, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return one.provider.prepare(*given) if one.provider.prepare else given


def text(result: dict[str, Any]) -> str:
    """The result as a table of text."""
    widths = [
        max((len(row[key]) for row in result["rows"]), default=0) for key in ("op", "provider", "shape")
    ]
    lines = []
    for row in result["rows"]:
        names = [
            row[key].ljust(width) for key, width in zip(("op", "provider", "shape"), widths, strict=True)
        ]
        line = "  ".join([*names, f"{row['microseconds']:>11.1f} us"])
        if "bytes" in row:
            rate = row["bytes"] / row["microseconds"] / 1e3
            flops = row["flops"] / row["microseconds"] / 1e6
            line += f"  {rate:>8.1f} GB/s  {flops:>8.3f} TFLOP/s  {row['of_roofline']:>6.1%} {row['bound']}"
        lines.append(line + ("" if row["timed"] != "launches" else "  (launches)"))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
