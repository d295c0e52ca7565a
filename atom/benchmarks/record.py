"""Keep results of benchmarks, and write docs/benchmarks.md from all that are kept.

    python -m atom.benchmarks.record latency.json --name smollm2-latency
    python -m atom.benchmarks.record serving.json --command '…' --server 'atom-launch …' --hardware '…'
    python -m atom.benchmarks.record

Without a file it writes the document anew. What a benchmark wrote with --output-json says by itself
what was run; the serving benchmark's results do not, so the flags have to.
"""

import argparse
import re
from pathlib import Path

from atom.benchmarks.arguments import single_line_errors
from atom.benchmarks.document import write_document
from atom.benchmarks.machine import software
from atom.benchmarks.records import FACTS, completed, read_json
from atom.benchmarks.report import write
from atom.benchmarks.serving.errors import BenchmarkError
from atom.config.cli import CommandLineParser


def main() -> None:
    args = _parser().parse_args()
    with single_line_errors():
        if args.file is not None:
            keep(args)
        elif args.name or any(getattr(args, name) for name in (*FACTS, "server")):
            raise BenchmarkError("name the FILE that the flags are about")
        write_document(args.results, args.document)
    print(f"written: {args.document}")


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="atom.benchmarks.record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path, nargs="?", metavar="FILE", help="a result to keep")
    add("--name", help="what it is kept as; the file's own name when absent")
    for name, about in {
        "command": "how it was run",
        "server": "how the server was started that it ran against",
        "hardware": "what it ran on",
        "software": "versions; those of this installation for a serving result when absent",
        "date": "when, YYYY-MM-DD",
    }.items():
        add(f"--{name}", metavar="TEXT", help=f"{about}, where the file does not say")
    add("--results", type=Path, default=Path("docs/benchmarks"), help="folder of the kept results")
    add("--document", type=Path, default=Path("docs/benchmarks.md"), help="file to write")
    return parser


def keep(args: argparse.Namespace) -> None:
    """Copy the file's result into the folder. Raises BenchmarkError."""
    name = args.name or args.file.stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise BenchmarkError(f"--name {name}: letters, digits, dots, dashes and underscores only")
    result = read_json(args.file)
    said = {fact: getattr(args, fact) for fact in (*FACTS, "server")}
    if "benchmark" not in result and not said["software"]:
        said["software"] = software()
    write(args.results / f"{name}.json", completed(result, said, str(args.file)))


if __name__ == "__main__":
    main()
