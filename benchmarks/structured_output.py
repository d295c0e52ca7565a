"""Measures structured output: its cost against free text, and what loading a large grammar costs others.

    python -m benchmarks.structured_output --model PATH

Batches with and without a grammar alternate, of the same requests and lengths; the ratio is that of the
medians. Then one request generates free text while a grammar that takes long is compiled and loaded, and
the longest time between two of its tokens is compared with that of a run without.
"""

import argparse
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np

from atom import EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from atom.shared.config.cli import CommandLineParser
from benchmarks.common.arguments import add_output_flag, not_negative, positive, single_line_errors
from benchmarks.common.offline import benchmark_parser, fixed_length, random_prompts, timed
from benchmarks.common.report import report, write

_CHARACTERS = 2000
_TOKENS = 100
_FREE_TEXT = StructuredOutputsParams(regex=rf"[ -~\n]{{{_CHARACTERS}}}")
"""Allows much in every step, and the end in none of them."""
_LARGE = StructuredOutputsParams(json={"enum": [f"value {number * 7919}" for number in range(6000)]})


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    try:
        given = EngineArgs.from_cli_args(args)
    except ValueError as error:
        parser.error(str(error))
    with single_line_errors():
        result = report("structured_output", *measure(given, args))
        print(text(result))
        write(args.output_json, result)


def _parser() -> CommandLineParser:
    parser, group = benchmark_parser("structured_output", __doc__)
    add = group.add_argument
    add("--input-len", type=positive, default=32, help="tokens of each prompt")
    add("--output-len", type=positive, default=48, help="tokens generated for each request")
    add("--batch-size", type=positive, default=32, help="requests that start together")
    add("--temperature", type=float, default=0.0, help="of all requests")
    add("--num-iters", type=positive, default=5, help="timed batches of each kind")
    add("--seed", type=not_negative, default=0, help="seed of the prompts")
    add_output_flag(group)
    return parser


def measure(given: EngineArgs, args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The GPUs, and the figures."""
    with given.create_engine() as engine:
        rng = np.random.default_rng(args.seed)
        prompts = random_prompts(engine, rng, args.batch_size, args.input_len)
        free = fixed_length(args.output_len, temperature=args.temperature)
        held = SamplingParams(
            temperature=args.temperature, max_tokens=args.output_len, structured_outputs=_FREE_TEXT
        )
        seconds: dict[str, list[float]] = {"free": [], "structured": []}
        for _ in range(args.num_iters + 1):
            for name, params in (("free", free), ("structured", held)):
                seconds[name].append(timed(engine, prompts, [params] * len(prompts)).seconds)
        medians = {name: median(values[1:]) for name, values in seconds.items()}  # the first warm up
        alone = longest_gap(engine, prompts[0], None)
        loading = longest_gap(engine, prompts[0], _LARGE)
        gpus = engine.gpu_names
    names = ("input_len", "output_len", "batch_size", "temperature")
    settings = {name: getattr(args, name) for name in names}
    gaps = {"alone": alone, "loading": loading}
    cost = medians["structured"] / medians["free"] - 1
    return gpus, {**settings, "seconds": medians, "cost": cost, "longest_gap_ms": gaps}


def longest_gap(engine: LLMEngine, prompt: list[int], other: StructuredOutputsParams | None) -> float:
    """Milliseconds between two tokens of a stream, while a request with another grammar starts and ends."""
    times: list[float] = []
    endless = fixed_length(engine.max_model_len - len(prompt) - 1)
    (stream,) = engine.add_request([prompt], endless, lambda _: times.append(time.monotonic()))
    while len(times) < _TOKENS // 2:
        engine.step()
    if other is not None:
        with ThreadPoolExecutor(1) as thread:
            compiling = thread.submit(engine.prepare_grammar, other)
            while not compiling.done():
                engine.step()
            compiling.result()
        waiting = {*engine.add_request([prompt], SamplingParams(max_tokens=8, structured_outputs=other))}
        while waiting:
            waiting -= {sequence.request_id for sequence in engine.step()}
    end = len(times) + _TOKENS // 2
    while len(times) < end:
        engine.step()
    engine.abort([stream])
    return 1000 * max(later - earlier for earlier, later in itertools.pairwise(times))


def text(result: dict[str, Any]) -> str:
    """The figures in two lines."""
    seconds = result["seconds"]
    gaps = result["longest_gap_ms"]
    return (
        f"{result['batch_size']} requests of {result['output_len']} tokens: {seconds['free']:.2f} s free, "
        f"{seconds['structured']:.2f} s structured, {100 * result['cost']:+.1f} %\n"
        f"longest gap between two tokens: {gaps['alone']:.0f} ms alone, "
        f"{gaps['loading']:.0f} ms while another grammar is compiled and loaded"
    )


if __name__ == "__main__":
    main()
