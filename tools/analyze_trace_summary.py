"""A Markdown report of a trace: times of prefill, decode and draft steps, and of their kernels.

python tools/analyze_trace_summary.py TRACE [--output report.md]

A kernel's time begins at the end of the previous kernels of its stream: with PDL it starts early and
waits, and its duration in the trace includes the wait.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: this folder alone is on it

from tools.traces.events import TraceError
from tools.traces.steps import read_steps
from tools.traces.summary import report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--output", type=Path, help="file to write; default: standard output")
    args = parser.parse_args()
    try:
        text = report(args.trace.name, read_steps(args.trace))
        if args.output is None:
            print(text, end="")
        else:
            args.output.write_text(text, encoding="utf-8")
    except (TraceError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
