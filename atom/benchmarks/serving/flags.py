"""The command line of the serving benchmark."""

import argparse

from atom.benchmarks.backend_request_func import BACKENDS
from atom.benchmarks.serving.datasets import DATASETS
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.flag_values import add_metric_flags, at_least, pair, positive
from atom.benchmarks.serving.tokenizer import MODES
from atom.shared.config.cli import CommandLineParser

__all__ = ["DEFAULT_PROMPTS", "check", "make_parser"]

DEFAULT_PROMPTS = 1000


def make_parser() -> argparse.ArgumentParser:
    """The parser with all flags."""
    parser = CommandLineParser(
        prog="atom.benchmarks.benchmark_serving",
        description="Measure the throughput and latencies of a running server.",
    )
    _add_server(parser)
    _add_load(parser)
    _add_requests(parser)
    _add_data(parser)
    _add_results(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    """Set defaults that depend on other flags. Raises BenchmarkError for flags that conflict."""
    if args.dataset_name is None and args.dataset_path is None:
        args.dataset_name = "random"
        print("No dataset given: using --dataset-name random")
    elif args.dataset_name is None:
        args.dataset_name = "sharegpt"
    if args.num_prompts is None and args.sweep is None:
        args.num_prompts = DEFAULT_PROMPTS
    if args.sweep and args.max_concurrency is not None:
        raise BenchmarkError("--sweep sets the concurrency: omit --max-concurrency")
    _check_backend(args)
    _check_random(args)


def _check_backend(args: argparse.Namespace) -> None:
    backend = BACKENDS[args.backend]
    if not args.endpoint.endswith(backend.endings):
        endings = " or ".join(ending for ending in backend.endings)
        raise BenchmarkError(f"--backend {args.backend} needs an --endpoint that ends with {endings}")
    if not backend.streams:
        print(
            f"--backend {args.backend} does not stream: TTFT and ITL are 0, TPOT is over the whole response"
        )
    if args.ignore_eos and not backend.ignores_eos:
        raise BenchmarkError(f"--backend {args.backend} does not support --ignore-eos")
    if args.best_of != 1 and args.backend != "tgi" and not backend.beams:
        raise BenchmarkError(f"--backend {args.backend} does not support --best-of")
    if args.use_beam_search and not backend.beams:
        raise BenchmarkError(f"--backend {args.backend} does not support --use-beam-search")
    if args.logprobs is not None and not backend.logprobs:
        raise BenchmarkError(f"--backend {args.backend} does not support --logprobs")


def _check_random(args: argparse.Namespace) -> None:
    if not 0 < args.random_range_ratio <= 1:
        raise BenchmarkError(
            f"--random-range-ratio {args.random_range_ratio}: it must be above 0 and at most 1"
        )
    if args.use_chat_template and args.dataset_name != "random":
        raise BenchmarkError("--use-chat-template is for --dataset-name random")
    if args.use_chat_template and args.backend == "openai-chat":
        raise BenchmarkError("--backend openai-chat applies the template itself: omit --use-chat-template")


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", default="vllm", choices=sorted(BACKENDS), help="Protocol of the server.")
    group.add_argument("--base-url", help="Such as http://host:port; replaces --host and --port.")
    group.add_argument("--host", default="127.0.0.1", help="Address of the server.")
    group.add_argument("--port", type=at_least(int, 1), default=8000, help="Its HTTP port.")
    group.add_argument("--endpoint", default="/v1/completions", help="Path of the requests.")
    group.add_argument("--model", required=True, help="Name or path of the model and its tokenizer.")
    group.add_argument("--served-model-name", help="Name of the model on the server, if different.")
    group.add_argument("--lora-modules", nargs="+", help="Names of adapters; each request uses a random one.")
    group.add_argument("--tokenizer", help="Name or path of the tokenizer. If unset: --model.")
    group.add_argument("--tokenizer-mode", default="auto", choices=MODES, help="Kind of tokenizer.")
    group.add_argument("--trust-remote-code", action="store_true", help="Run the tokenizer's own code.")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--num-prompts",
        type=at_least(int, 1),
        help=f"Requests to send. If unset: {DEFAULT_PROMPTS}, in a sweep ten times the concurrency.",
    )
    group.add_argument(
        "--request-rate",
        type=positive,
        default=float("inf"),
        help="Requests per second; inf sends all at once.",
    )
    group.add_argument(
        "--burstiness",
        type=positive,
        default=1.0,
        help="1 is a Poisson process; below 1 arrivals are burstier, above more regular.",
    )
    group.add_argument("--max-concurrency", type=at_least(int, 1), help="Most requests in flight.")
    group.add_argument(
        "--sweep",
        type=at_least(int, 1),
        nargs="+",
        metavar="CONCURRENCY",
        help="One run per concurrency, then a table and a plot.",
    )
    group.add_argument(
        "--num-warmups", type=at_least(int, 0), default=1, help="Untimed requests before the run."
    )
    group.add_argument(
        "--seed", type=at_least(int, 0), default=0, help="Seed of prompts, lengths and arrival times."
    )
    group.add_argument(
        "--profile", action="store_true", help="Run the server's profiler during the benchmark."
    )
    group.add_argument("--disable-tqdm", action="store_true", help="Do not show a progress bar.")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--ignore-eos", action="store_true", help="Generate the full output length.")
    group.add_argument("--best-of", type=at_least(int, 1), default=1, help="Sequences to choose the best of.")
    group.add_argument("--use-beam-search", action="store_true", help="Beam search with --best-of beams.")
    group.add_argument("--logprobs", type=at_least(int, 0), help="Log probabilities to request per token.")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset-name",
        choices=sorted(DATASETS),
        help="Source of the prompts. If unset: sharegpt with --dataset-path, else random.",
    )
    group.add_argument("--dataset-path", help="File of the dataset; for hf also a name on the hub.")
    lengths: list[tuple[str, int | None, int, str]] = [
        ("--random-input-len", 1024, 1, "Tokens of a random prompt, without the prefix."),
        ("--random-output-len", 128, 1, "Output tokens of a random request."),
        ("--random-prefix-len", 0, 0, "Tokens of the prefix common to all random prompts."),
        ("--sonnet-input-len", 550, 1, "Tokens of a sonnet prompt, approximately."),
        ("--sonnet-output-len", 150, 1, "Output tokens of a sonnet request."),
        ("--sonnet-prefix-len", 200, 1, "Tokens of the prefix common to all sonnet prompts, approximately."),
        ("--sharegpt-output-len", None, 1, "Output tokens. If unset: as in the dataset."),
        ("--hf-output-len", None, 1, "Output tokens. If unset: as in the dataset."),
    ]
    for flag, default, least, text in lengths:
        group.add_argument(flag, type=at_least(int, least), default=default, help=text)
    group.add_argument(
        "--random-range-ratio",
        type=positive,
        default=1.0,
        help="Random lengths are uniform from this fraction of the length up to the length.",
    )
    group.add_argument(
        "--use-chat-template", action="store_true", help="Apply the chat template to random prompts."
    )
    group.add_argument("--hf-subset", help="Subset of a dataset on the hub.")
    group.add_argument("--hf-split", help="Split of a dataset on the hub. If unset: train.")


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    add_metric_flags(group, "99")
    group.add_argument("--save-result", action="store_true", help="Write a JSON file.")
    group.add_argument(
        "--save-detailed", action="store_true", help="Include lengths, times, text and error of each request."
    )
    group.add_argument(
        "--metadata",
        nargs="+",
        type=pair,
        metavar="KEY=VALUE",
        help="Added to the file; cannot replace figures of the run.",
    )
    group.add_argument("--result-dir", default=".", help="Directory for the files.")
    group.add_argument(
        "--result-filename", help="Name of the JSON file. If unset: backend, rate, model and date."
    )
