"""Microseconds of the all-reduce and norm after each layer, between the tensor-parallel ranks of this host.

    python -m benchmarks.all_reduce --ranks 2 --tokens 1 16 64 --width 4096

Compares torch.distributed's all-reduce and a separate `add_rms_norm` with the communicator's
`all_reduce_add_rms_norm`, which layers call. Both are checked against each other first. A row is the
median of rounds that alternate between the two; on GPUs a round is one replay of a CUDA graph. *one
kernel* says whether the communicator ran a fused kernel, or the same two calls.
"""

import argparse
from typing import Any

from atom.shared.config.cli import CommandLineParser
from benchmarks.common.arguments import add_output_flag, positive, single_line_errors
from benchmarks.common.report import report, write
from benchmarks.ranks.all_reduce_rank import AllReduceLaunch
from benchmarks.ranks.ranks import add_rank_flags, gpu_names, measure, rank_settings

TOKENS = (1, 4, 16, 64, 256, 1024)


def main() -> None:
    args = _parser().parse_args()
    with single_line_errors():
        settings = rank_settings(args, "an all-reduce")
        launch = AllReduceLaunch(**settings, tokens=args.tokens, width=args.width)
        figures = {
            "ranks": launch.ranks,
            "device": launch.device,
            "dtype": launch.dtype,
            "width": launch.width,
        }
        rows = measure("benchmarks.ranks.all_reduce_rank", launch)
        result = report("all_reduce", gpu_names(launch), {**figures, "rows": rows})
        print(text(result))
        write(args.output_json, result)


def text(result: dict[str, Any]) -> str:
    """The result as a table of text."""
    lines = [
        f"{result['ranks']} ranks ({result['device']}), {result['dtype']}, width {result['width']}",
        f"{'tokens':>6}  {'two calls us':>12}  {'communicator us':>15}  one kernel",
    ]
    for row in result["rows"]:
        times = f"{row['two_calls_us']:>12.1f}  {row['communicator_us']:>15.1f}"
        lines.append(f"{row['tokens']:>6}  {times}  {'yes' if row['one_kernel'] else 'no'}")
    return "\n".join(lines)


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="benchmarks.all_reduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=positive, nargs="+", default=list(TOKENS), help="rows of the tensor")
    add("--width", type=positive, default=4096, help="features of a token")
    add_rank_flags(parser, calls=50, rounds=51)
    add_output_flag(parser)
    return parser


if __name__ == "__main__":
    main()
