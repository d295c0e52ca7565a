"""Microseconds of a dispatch and its combine, by each form, between the data-parallel ranks of this host.

    python -m benchmarks.expert_dispatch --ranks 8 --tokens 1 64 1024 --widths 2048 7168

Each form is checked first. A figure is the median of rounds that alternate between the forms, without the
experts' own work. On GPUs a form that graphs can capture is measured as the replay of a graph, and also
launched eagerly; an all-to-all of variable sizes is always eager. In skewed rows every token selects
experts of rank 0 alone. The figures of ATOM_ALL2ALL_PADDED_TOKENS and ATOM_ALL2ALL_EAGER_TOKENS are read
off here: they count the tokens of all ranks.
"""

import argparse
from typing import Any

from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.config.cli import CommandLineParser
from benchmarks.common.arguments import add_output_flag, positive, single_line_errors
from benchmarks.common.report import report, write
from benchmarks.ranks.expert_dispatch_rank import DispatchLaunch
from benchmarks.ranks.ranks import add_rank_flags, gpu_names, measure, rank_settings

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
WIDTHS = (2048, 7168)


def main() -> None:
    args = _parser().parse_args()
    with single_line_errors():
        settings = rank_settings(args, "a dispatch to experts")
        launch = DispatchLaunch(
            **settings, tokens=args.tokens, widths=args.widths, experts=args.experts, chosen=args.chosen
        )
        if launch.experts % launch.ranks or launch.experts // launch.ranks < launch.chosen:
            raise BenchmarkError(
                f"--experts {launch.experts}: use a multiple of {launch.ranks} ranks, "
                f"of at least {launch.ranks * launch.chosen}"
            )
        figures = {"ranks": launch.ranks, "device": launch.device, "dtype": launch.dtype}
        figures |= {"experts": launch.experts, "chosen": launch.chosen}
        rows = measure("benchmarks.ranks.expert_dispatch_rank", launch)
        result = report("expert_dispatch", gpu_names(launch), {**figures, "rows": rows})
        print(text(result))
        write(args.output_json, result)


def text(result: dict[str, Any]) -> str:
    """The result as a table of text."""
    forms = [name.removesuffix("_us") for name in result["rows"][0] if name.endswith("_us")]
    lines = [
        f"{result['ranks']} ranks ({result['device']}), {result['dtype']}, "
        f"{result['chosen']} of {result['experts']} experts; us of a dispatch and its combine",
        f"{'width':>6}  {'skewed':>6}  {'tokens':>6}  " + "  ".join(f"{form:>12}" for form in forms),
    ]
    for row in result["rows"]:
        times = "  ".join(f"{row[f'{form}_us']:>12.1f}" for form in forms)
        skewed = "yes" if row["skewed"] else "no"
        lines.append(f"{row['width']:>6}  {skewed:>6}  {row['tokens']:>6}  {times}")
    return "\n".join(lines)


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="benchmarks.expert_dispatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=positive, nargs="+", default=list(TOKENS), help="tokens of each rank")
    add("--widths", type=positive, nargs="+", default=list(WIDTHS), help="features of a token")
    add("--experts", type=positive, default=256, help="experts of all ranks")
    add("--chosen", type=positive, default=8, help="experts of a token")
    add_rank_flags(parser, calls=10, rounds=21)
    add_output_flag(parser)
    return parser


if __name__ == "__main__":
    main()
