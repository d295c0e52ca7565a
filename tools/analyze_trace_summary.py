"""A Markdown report of a trace: what prefill, decode and draft steps took, and their kernels.

python tools/analyze_trace_summary.py TRACE [--output report.md]

A kernel's time is from the end of those before it on its stream, for one that is launched early waits
there, and its duration in the trace counts the wait.
"""

import argparse
import sys
from pathlib import Path

from atom.traces.events import TraceError
from atom.traces.steps import read_steps
from atom.traces.summary import report


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
