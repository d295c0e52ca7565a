"""The kernel times of one layer, in a prefill and in a decode step, as two Excel files.

python tools/parse_trace.py TRACE [--layer N]

TRACE is the file of a server with --torch-profiler-dir and --mark-trace whose name begins with the
model's. Writes prefill_breakdown.xlsx and decode_breakdown.xlsx into the current directory, from the
first step of each kind. A kernel's time begins at the end of the previous kernels of its stream: with
PDL it starts early and waits, and its duration in the trace includes the wait.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: this folder alone is on it

from tools.traces.breakdown import break_down
from tools.traces.events import TraceError
from tools.traces.steps import Step, read_steps
from tools.traces.workbook import write_workbook

KINDS = ("prefill", "decode")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("filepath", type=Path, metavar="TRACE")
    parser.add_argument("--layer", type=layer_number, default=3, metavar="N", help="from 0; default 3")
    parser.add_argument(
        "--capture-trace", type=Path, help="of the graphs; default: the newest capture_graph_* next to TRACE"
    )
    args = parser.parse_args()
    try:
        steps = read_steps(args.filepath, args.capture_trace)
        written = [write(kind, steps, args.layer) for kind in KINDS]
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed: pip install 'atom-serve[traces]'")
    except (TraceError, OSError) as error:
        sys.exit(f"error: {error}")
    if not any(written):
        sys.exit(f"error: {args.filepath} has neither a prefill nor a decode step")


def layer_number(text: str) -> int:
    """Argument type: a layer's number, from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a layer: they count from 0")
    return int(text)


def write(kind: str, steps: list[Step], layer: int) -> bool:
    """Write the file of one kind of step; returns False if the trace has no such step."""
    step = next((step for step in steps if step.kind == kind), None)
    if step is None:
        print(f"no {kind} step: no {kind}_breakdown.xlsx")
        return False
    breakdown = break_down(step, layer)
    path = Path(f"{kind}_breakdown.xlsx")
    write_workbook(breakdown, kind, path)
    print(f"{path}: layer {layer} of {step.label}, {breakdown.total_us:.1f} us")
    print(f"  averages: {averages(breakdown.averaged)}")
    return True


def averages(layers: list[int]) -> str:
    """The layers of the averages, as text."""
    if not layers:
        return "none, the layers run different kernels"
    every = "every other one of " if layers[1:] and layers[1] - layers[0] == 2 else ""
    return f"over {every}layers {layers[0]} to {layers[-1]}"


if __name__ == "__main__":
    main()
