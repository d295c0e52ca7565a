"""Records benchmark results, and writes docs/measurements/benchmarks.md from all recorded ones.

    python -m benchmarks.record latency.json --name smollm2-latency
    python -m benchmarks.record serving.json --command '…' --server 'atom-launch …' --hardware '…'
    python -m benchmarks.record

Without a file it only writes the document. A result written with --output-json holds the facts of its
run; for a result of the serving benchmark the flags must give them.
"""

import argparse
import re
from pathlib import Path

from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.config.cli import CommandLineParser
from benchmarks.common.arguments import single_line_errors
from benchmarks.common.machine import software
from benchmarks.common.report import write
from benchmarks.pages.document import write_document
from benchmarks.pages.records import FACTS, completed, read_json


def main() -> None:
    args = _parser().parse_args()
    with single_line_errors():
        if args.file is not None:
            add_record(args)
        elif args.name or any(getattr(args, name) for name in (*FACTS, "server")):
            raise BenchmarkError("the flags describe a result: name its FILE")
        write_document(args.results, args.document)
    print(f"written: {args.document}")


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="benchmarks.record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path, nargs="?", metavar="FILE", help="result to record")
    add("--name", help="name of the record; default: the file's name")
    for name, about in {
        "command": "command of the benchmark",
        "server": "command of the server",
        "hardware": "hardware",
        "software": "versions; default for a serving result: those of this installation",
        "date": "date, YYYY-MM-DD",
    }.items():
        add(f"--{name}", metavar="TEXT", help=f"{about}, if the file lacks it")
    add("--results", type=Path, default=Path("docs/measurements/results"), help="folder of recorded results")
    add("--document", type=Path, default=Path("docs/measurements/benchmarks.md"), help="file to write")
    return parser


def add_record(args: argparse.Namespace) -> None:
    """Add the file's result to the folder. Raises BenchmarkError."""
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
