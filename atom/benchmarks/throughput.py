"""Tokens a second of the offline engine at several numbers of requests at once.

    python -m atom.benchmarks.throughput --model PATH --concurrency 1 16 64

Prompts are random token ids, different in every round, so that nothing comes out of the prefix
cache. The numbers take turns for `--rounds` rounds; medians are printed.
"""

import json
import random
import statistics
import time
from dataclasses import asdict, dataclass

from atom import EngineArgs, LLMEngine, SamplingParams
from atom.config.cli import CommandLineParser


@dataclass(frozen=True)
class Row:
    """Medians over the rounds at one concurrency."""

    concurrency: int
    output_tokens_per_s: float
    """All output tokens over the whole time, prompts included."""
    tpot_ms: float
    """Time between two tokens of one request."""
    ttft_ms: float
    """Time to the first token."""


def main() -> None:
    parser = CommandLineParser(prog="atom.benchmarks.throughput", description=__doc__)
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64], help="requests at once")
    parser.add_argument("--input-len", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens generated for each request")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each concurrency")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    with EngineArgs.from_cli_args(args).create_engine() as engine:
        rows = measure(engine, args.concurrency, args.rounds, args.input_len, args.output_len)
    print(json.dumps([asdict(row) for row in rows]) if args.json else table(rows))


def measure(
    engine: LLMEngine, concurrencies: list[int], rounds: int, input_len: int, output_len: int
) -> list[Row]:
    """One Row for each concurrency."""
    source = random.Random(0)
    run(engine, source, max(concurrencies), input_len, 2)  # warm up
    results: dict[int, list[Row]] = {count: [] for count in concurrencies}
    for _ in range(rounds):
        for count in concurrencies:
            results[count].append(run(engine, source, count, input_len, output_len))
    return [median(rows) for rows in results.values()]


def run(engine: LLMEngine, source: random.Random, count: int, input_len: int, output_len: int) -> Row:
    """One batch of `count` requests that start together."""
    vocabulary = engine.checkpoint.vocab_size
    prompts = [[source.randrange(vocabulary) for _ in range(input_len)] for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    started = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - started
    return Row(
        concurrency=count,
        output_tokens_per_s=round(count * output_len / seconds, 1),
        tpot_ms=round(statistics.median(output["tpot"] for output in outputs) * 1e3, 2),
        ttft_ms=round(statistics.median(output["ttft"] for output in outputs) * 1e3, 1),
    )


def median(rows: list[Row]) -> Row:
    """Field by field."""
    columns = zip(*(asdict(row).values() for row in rows), strict=True)
    return Row(*(statistics.median(column) for column in columns))


def table(rows: list[Row]) -> str:
    """The rows for people to read."""
    lines = ["concurrency  output tok/s  TPOT ms  TTFT ms"]
    lines += [
        f"{row.concurrency:>11}  {row.output_tokens_per_s:>12.1f}  {row.tpot_ms:>7.2f}  {row.ttft_ms:>7.1f}"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
