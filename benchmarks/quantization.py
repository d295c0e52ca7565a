"""Perplexity and weight bytes of a plain model, and of the model quantized online to each format.

    python -m benchmarks.quantization --model PATH [--formats ptpc_fp8 mxfp4] [--text FILE]

Perplexity is that of fixed windows of a text, each without context: by default English prose that comes
with Python, the reference of the language. Every format runs in an engine of its own, started with the
same flags. Layers whose sizes a format does not divide stay plain: they are excluded by --exclude.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from atom import SamplingParams
from atom.shared.config.cli import CommandLineParser
from atom.shared.config.online_quantization import FORMATS
from benchmarks.common.arguments import add_output_flag, positive, single_line_errors
from benchmarks.common.offline import benchmark_parser, running_engine
from benchmarks.common.report import report, write

_PLAIN = "plain"
_ALIASES = ("per_block128_fp8",)
_TOPICS = ("execmodel", "types", "compound", "assignment", "strings", "specialnames")


@dataclass(frozen=True)
class Quality:
    """What one format costs."""

    format: str
    perplexity: float
    weight_bytes: int


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    with single_line_errors():
        text = args.text.read_text(encoding="utf-8") if args.text else prose()
        rows = []
        for name in [_PLAIN, *args.formats]:
            rows.append(measured(parser, args, name, text))
            print(table(rows[-1:], rows[0]), flush=True)
        print(f"\n{table(rows, rows[0])}")
        write(args.output_json, report("quantization", [], {"rows": [vars(row) for row in rows]}))


def _parser() -> CommandLineParser:
    parser, group = benchmark_parser("quantization", __doc__)
    add = group.add_argument
    known = [name for name in FORMATS if name not in _ALIASES]
    add("--formats", nargs="+", choices=known, default=known, help="formats to compare with the plain model")
    add("--text", type=Path, help="a text file")
    add("--windows", type=positive, default=16, help="windows of the text")
    add("--window-len", type=positive, default=512, help="tokens of each window")
    add("--exclude", nargs="*", default=[], help="FORMAT=PATTERN: layers that stay plain in a format")
    add_output_flag(group)
    return parser


def prose() -> str:
    """English text that every Python has; the versions differ a little."""
    return "\n\n".join(topics[name] for name in _TOPICS if name in topics)


def measured(parser: CommandLineParser, args: argparse.Namespace, name: str, text: str) -> Quality:
    """The quality of one format, from an engine of its own. Raises ValueError for a short text."""
    settings = {"global_quant_config": name, "exclude_layer": excluded(args.exclude, name)}
    args.online_quant_config = None if name == _PLAIN else json.dumps(settings)
    with running_engine(parser, args) as engine:
        if engine.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, which the text needs")
        ids = engine.tokenizer.encode(text)
        length = args.window_len
        if len(ids) < args.windows * length:
            raise ValueError(
                f"the text has {len(ids)} tokens, and {args.windows} windows of {length} need more"
            )
        windows = [ids[start * length : (start + 1) * length] for start in range(args.windows)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        scored = [engine.generate([window], params)[0]["prompt_logprobs"] for window in windows]
        values = [
            position[token]
            for window, positions in zip(windows, scored, strict=True)
            for token, position in zip(window[1:], positions[1:], strict=True)
        ]
        return Quality(name, math.exp(-sum(values) / len(values)), sum(engine.weight_bytes))


def excluded(given: list[str], name: str) -> list[str]:
    """The patterns after FORMAT= of this format."""
    return [pattern for each in given for format, _, pattern in [each.partition("=")] if format == name]


def table(rows: list[Quality], plain: Quality) -> str:
    """One line for each row: perplexity, its change, and MiB of weights."""
    return "\n".join(
        f"| {row.format} | {row.perplexity:.3f} | {100 * (row.perplexity / plain.perplexity - 1):+.2f} % "
        f"| {row.weight_bytes / (1 << 20):.0f} MiB |"
        for row in rows
    )


if __name__ == "__main__":
    main()
