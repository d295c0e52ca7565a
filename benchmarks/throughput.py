"""Measures requests and tokens per second of the offline engine, with all requests submitted at once.

    python -m benchmarks.throughput --model PATH --input-len 512 --output-len 128 --num-prompts 256
    python -m benchmarks.throughput --model PATH --dataset-name sharegpt --dataset-path FILE

At most --max-num-seqs sequences run together. Random prompts are token ids; sharegpt's are texts, with the
recorded output lengths or --output-len. One untimed request runs before. Tokens are sampled at
temperature 1, and end-of-sequence tokens are ignored.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from atom import LLMEngine
from atom.benchmarks.serving.datasets import SampleRequest, TextSource, load_requests
from atom.benchmarks.serving.tokenizer import load_tokenizer
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

RANDOM_INPUT_LEN = 1024
RANDOM_OUTPUT_LEN = 128


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if conflict := _conflict(args):
        parser.error(conflict)
    with single_line_errors():
        with running_engine(parser, args) as engine:
            run = measure(engine, requests_of(args, engine), args.n)
            gpus = engine.gpu_names
        result = report("throughput", gpus, figures(run, args))
        print(text(result))
        write(args.output_json, result)


def _parser() -> CommandLineParser:
    parser, group = benchmark_parser("throughput", __doc__)
    add = group.add_argument
    add("--dataset-name", choices=["random", "sharegpt"], default="random", help="source of the requests")
    add("--dataset-path", "--dataset", type=Path, metavar="FILE", help="the ShareGPT JSON file")
    add("--input-len", type=positive, help=f"tokens of a random prompt (default {RANDOM_INPUT_LEN})")
    add(
        "--output-len",
        type=positive,
        help=f"tokens generated for each request (default {RANDOM_OUTPUT_LEN}, or as in the dataset)",
    )
    add(
        "--prefix-len",
        type=not_negative,
        default=0,
        help="tokens of a common prefix, added to random prompts",
    )
    add("--num-prompts", type=positive, default=1000, help="requests")
    add("--n", type=positive, default=1, help="sequences per request")
    add("--seed", type=not_negative, default=0, help="seed of the prompts")
    add_output_flag(group)
    return parser


def _conflict(args: argparse.Namespace) -> str:
    """The conflict between flags; empty if there is none."""
    if args.dataset_name == "random":
        return "--dataset-path is for --dataset-name sharegpt" if args.dataset_path else ""
    if args.dataset_path is None:
        return "--dataset-name sharegpt needs --dataset-path, its JSON file"
    if not args.dataset_path.is_file():
        return f"--dataset-path {args.dataset_path}: no such file"
    if args.input_len is not None or args.prefix_len:
        return "--input-len and --prefix-len are for random prompts only"
    return ""


def requests_of(args: argparse.Namespace, engine: LLMEngine) -> list[SampleRequest]:
    """The requests. Raises BenchmarkError for a file without any, or a model without a tokenizer for it."""
    wanted = argparse.Namespace(
        dataset_name=args.dataset_name,
        dataset_path=args.dataset_path,
        num_prompts=args.num_prompts,
        seed=args.seed,
        sharegpt_output_len=args.output_len,
        random_input_len=args.input_len or RANDOM_INPUT_LEN,
        random_output_len=args.output_len or RANDOM_OUTPUT_LEN,
        random_prefix_len=args.prefix_len,
        random_range_ratio=1.0,
        use_chat_template=False,
    )
    # Random ids need no tokenizer and have the exact length.
    tokenized = args.dataset_name != "random" and engine.checkpoint.tokenizer_file is not None
    tokenizer = load_tokenizer(engine.checkpoint.directory) if tokenized else None
    return load_requests(wanted, TextSource(tokenizer, engine.checkpoint.vocab_size))


def measure(engine: LLMEngine, requests: list[SampleRequest], n: int = 1) -> Run:
    """Run all requests at once, after one untimed request with another prompt."""
    prompts: list[Any] = [request.prompt for request in requests]
    params = [fixed_length(request.output_len, n) for request in requests]
    rng = np.random.default_rng(len(requests))
    timed(engine, random_prompts(engine, rng, 1, requests[0].prompt_len), params[:1])
    return timed(engine, prompts, params, phase="requests")


def figures(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Rates over the whole time, including prefill. `n` sequences of a prompt are one request."""
    requests = len(run.sequences) // args.n
    prompts = run.input_tokens // args.n
    tokens = prompts + run.output_tokens
    return {
        **forced_acceptance(args),
        "dataset": args.dataset_name,
        "elapsed_time": run.seconds,
        "num_requests": requests,
        "total_num_tokens": tokens,
        "total_input_tokens": prompts,
        "total_output_tokens": run.output_tokens,
        "requests_per_second": requests / run.seconds,
        "tokens_per_second": tokens / run.seconds,
        "output_tokens_per_second": run.output_tokens / run.seconds,
    }


def text(result: dict[str, Any]) -> str:
    """The figures as text."""
    return (
        f"{result['num_requests']} requests, {result['total_input_tokens']} prompt tokens and "
        f"{result['total_output_tokens']} generated tokens in {result['elapsed_time']:.2f} s\n"
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )


if __name__ == "__main__":
    main()
