"""Measures one batch of requests offline: the whole batch, the first token, and each later token.

    python -m benchmarks.latency --model PATH --batch-size 8 --input-len 32 --output-len 128

The requests of an iteration start together. Prompts are new random token ids in every iteration, so that
the prefix cache has none of them; tokens are sampled at temperature 1.
"""

import argparse
from typing import Any

import numpy as np
from tqdm import trange

from atom import LLMEngine
from atom.shared.config.cli import CommandLineParser
from benchmarks.common.arguments import add_output_flag, not_negative, positive, single_line_errors
from benchmarks.common.offline import (
    Run,
    benchmark_parser,
    fixed_length,
    forced_acceptance,
    random_prompts,
    running_engine,
    timed,
)
from benchmarks.common.report import report, write

PERCENTILES = (10, 25, 50, 75, 90, 99)


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    with single_line_errors():
        with running_engine(parser, args) as engine:
            runs = measure(engine, args)
            gpus = engine.gpu_names
        result = report("latency", gpus, figures(runs, args))
        print(text(result))
        write(args.output_json, result)


def _parser() -> CommandLineParser:
    parser, group = benchmark_parser("latency", __doc__)
    add = group.add_argument
    add("--input-len", type=positive, default=32, help="tokens of each prompt")
    add("--output-len", type=positive, default=128, help="tokens generated for each request")
    add("--batch-size", type=positive, default=8, help="requests that start together")
    add("--n", type=positive, default=1, help="sequences per request")
    add("--num-iters-warmup", type=not_negative, default=10, help="untimed iterations before")
    add("--num-iters", type=positive, default=30, help="timed iterations")
    add("--seed", type=not_negative, default=0, help="seed of the prompts")
    add_output_flag(group)
    return parser


def measure(engine: LLMEngine, args: argparse.Namespace) -> list[Run]:
    """Run all iterations; returns the timed ones."""
    rng = np.random.default_rng(args.seed)
    params = [fixed_length(args.output_len, args.n)] * args.batch_size

    def iterations(count: int, phase: str) -> list[Run]:
        return [
            timed(engine, random_prompts(engine, rng, args.batch_size, args.input_len), params)
            for _ in trange(count, desc=phase, leave=False, disable=None)
        ]

    iterations(args.num_iters_warmup, "warming up")
    return iterations(args.num_iters, "measuring")


def figures(runs: list[Run], args: argparse.Namespace) -> dict[str, Any]:
    """In seconds: whole batches, time to first token, time per later token."""
    latencies = [run.seconds for run in runs]
    sequences = [sequence for run in runs for sequence in run.sequences]
    return {
        **forced_acceptance(args),
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "n": args.n,
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": percentiles(latencies),
        "avg_ttft": float(np.mean([sequence.ttft for sequence in sequences])),
        "ttft_percentiles": percentiles([sequence.ttft for sequence in sequences]),
        "avg_tpot": float(np.mean([sequence.tpot for sequence in sequences])),
        "tpot_percentiles": percentiles([sequence.tpot for sequence in sequences]),
        "output_tokens_per_second": sum(run.output_tokens for run in runs) / sum(latencies),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Values by percentile."""
    values = np.percentile(seconds, PERCENTILES)
    return {str(number): float(value) for number, value in zip(PERCENTILES, values, strict=True)}


def text(result: dict[str, Any]) -> str:
    """The figures as a table."""
    rows = [
        ("whole batch", "avg_latency", "percentiles"),
        ("first token", "avg_ttft", "ttft_percentiles"),
        ("each later token", "avg_tpot", "tpot_percentiles"),
    ]
    lines = [" " * 16 + "".join(f"{name:>11}" for name in ("mean ms", *(f"p{p} ms" for p in PERCENTILES)))]
    for title, mean, spread in rows:
        values = [result[mean], *result[spread].values()]
        lines.append(f"{title:16}" + "".join(f"{value * 1e3:>11.2f}" for value in values))
    return "\n".join([*lines, f"{result['output_tokens_per_second']:.1f} output tokens/s"])


if __name__ == "__main__":
    main()
