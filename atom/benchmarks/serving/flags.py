"""The command line of the serving benchmark."""

import argparse
from collections.abc import Callable
from typing import TypeVar

from atom.benchmarks.backend_request_func import BACKENDS
from atom.benchmarks.serving.datasets import DATASETS
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.metrics import METRICS, SLO_METRICS
from atom.benchmarks.serving.tokenizer import MODES
from atom.config.cli import CommandLineParser

__all__ = ["DEFAULT_PROMPTS", "check", "make_parser"]

N = TypeVar("N", int, float)

DEFAULT_PROMPTS = 1000


def make_parser() -> argparse.ArgumentParser:
    """Every flag, by groups."""
    parser = CommandLineParser(
        prog="atom.benchmarks.benchmark_serving",
        description="Measure a server that runs: throughput, and how long its callers wait.",
    )
    _add_server(parser)
    _add_load(parser)
    _add_requests(parser)
    _add_data(parser)
    _add_results(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    """Settle what depends on other flags. Raises BenchmarkError for what does not go together."""
    if args.dataset_name is None and args.dataset_path is None:
        args.dataset_name = "random"
        print("No data set named: --dataset-name random is used")
    elif args.dataset_name is None:
        args.dataset_name = "sharegpt"
    if args.num_prompts is None and args.sweep is None:
        args.num_prompts = DEFAULT_PROMPTS
    if args.sweep and args.max_concurrency is not None:
        raise BenchmarkError("--sweep sets the concurrency itself: leave --max-concurrency out")
    _check_backend(args)
    _check_random(args)


def _check_backend(args: argparse.Namespace) -> None:
    backend = BACKENDS[args.backend]
    if not args.endpoint.endswith(backend.endings):
        endings = " or ".join(ending for ending in backend.endings)
        raise BenchmarkError(f"--backend {args.backend} needs an --endpoint that ends with {endings}")
    if not backend.streams:
        print(
            f"--backend {args.backend} answers in one piece: TTFT and ITL stay 0, TPOT is of the whole answer"
        )
    if args.ignore_eos and not backend.ignores_eos:
        raise BenchmarkError(f"--backend {args.backend} cannot be told to --ignore-eos")
    if args.best_of != 1 and args.backend != "tgi" and not backend.beams:
        raise BenchmarkError(f"--backend {args.backend} has no --best-of")
    if args.use_beam_search and not backend.beams:
        raise BenchmarkError(f"--backend {args.backend} has no --use-beam-search")
    if args.logprobs is not None and not backend.logprobs:
        raise BenchmarkError(f"--backend {args.backend} has no --logprobs")


def _check_random(args: argparse.Namespace) -> None:
    if not 0 < args.random_range_ratio <= 1:
        raise BenchmarkError(f"--random-range-ratio {args.random_range_ratio}: above 0, and 1 at most")
    if args.use_chat_template and args.dataset_name != "random":
        raise BenchmarkError("--use-chat-template is for --dataset-name random")
    if args.use_chat_template and args.backend == "openai-chat":
        raise BenchmarkError(
            "--backend openai-chat applies the template itself: leave --use-chat-template out"
        )


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", default="vllm", choices=sorted(BACKENDS), help="Protocol of the server.")
    group.add_argument("--base-url", help="Such as http://host:port; --host and --port when absent.")
    group.add_argument("--host", default="127.0.0.1", help="Where the server listens.")
    group.add_argument("--port", type=_at_least(int, 1), default=8000, help="Its HTTP port.")
    group.add_argument("--endpoint", default="/v1/completions", help="Path of the requests.")
    group.add_argument("--model", required=True, help="Model's name or path; also where its tokenizer is.")
    group.add_argument("--served-model-name", help="Name that the server knows the model by, if another.")
    group.add_argument(
        "--lora-modules", nargs="+", help="Names of adapters; each request takes one of them by chance."
    )
    group.add_argument("--tokenizer", help="Name or path of the tokenizer; that of --model when absent.")
    group.add_argument("--tokenizer-mode", default="auto", choices=MODES, help="Kind of tokenizer.")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="Run code that comes with the tokenizer."
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--num-prompts",
        type=_at_least(int, 1),
        help=f"Requests to send; {DEFAULT_PROMPTS} when absent, and in a sweep ten times the concurrency.",
    )
    group.add_argument(
        "--request-rate",
        type=_positive,
        default=float("inf"),
        help="Requests a second; inf sends all at once.",
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        help="1 is a Poisson process; less comes in bursts, more evenly spaced.",
    )
    group.add_argument("--max-concurrency", type=_at_least(int, 1), help="Requests in flight at most.")
    group.add_argument(
        "--sweep",
        type=_at_least(int, 1),
        nargs="+",
        metavar="CONCURRENCY",
        help="One run at each of these concurrencies, then a table and a plot of them.",
    )
    group.add_argument("--num-warmups", type=_at_least(int, 0), default=1, help="Untimed requests before.")
    group.add_argument("--seed", type=_at_least(int, 0), default=0, help="Of prompts, lengths and arrivals.")
    group.add_argument(
        "--profile", action="store_true", help="Have the server's profiler run during the benchmark."
    )
    group.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar.")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--ignore-eos", action="store_true", help="Generate the full length always.")
    group.add_argument("--best-of", type=_at_least(int, 1), default=1, help="Answers to choose the best of.")
    group.add_argument("--use-beam-search", action="store_true", help="Search with --best-of beams.")
    group.add_argument("--logprobs", type=_at_least(int, 0), help="Log probabilities to ask for.")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset-name",
        choices=sorted(DATASETS),
        help="Where prompts come from; sharegpt with a --dataset-path, random without one.",
    )
    group.add_argument("--dataset-path", help="The data set's file; for hf a name on the hub too.")
    lengths: list[tuple[str, int | None, int, str]] = [
        ("--random-input-len", 1024, 1, "Tokens of a random prompt, behind the prefix."),
        ("--random-output-len", 128, 1, "Tokens that a random prompt asks for."),
        ("--random-prefix-len", 0, 0, "Tokens that all random prompts begin with."),
        ("--sonnet-input-len", 550, 1, "Tokens of a sonnet prompt, nearly."),
        ("--sonnet-output-len", 150, 1, "Tokens that a sonnet prompt asks for."),
        ("--sonnet-prefix-len", 200, 1, "Tokens that all sonnet prompts begin with, nearly."),
        ("--sharegpt-output-len", None, 1, "Tokens to ask for; as long as the recorded answer when absent."),
        ("--hf-output-len", None, 1, "Tokens to ask for; as long as the recorded answer when absent."),
    ]
    for flag, default, least, text in lengths:
        group.add_argument(flag, type=_at_least(int, least), default=default, help=text)
    group.add_argument(
        "--random-range-ratio",
        type=_positive,
        default=1.0,
        help="Random lengths are drawn from this part of the length up to all of it.",
    )
    group.add_argument(
        "--use-chat-template", action="store_true", help="Random prompts are chat messages of that length."
    )
    group.add_argument("--hf-subset", help="Configuration of a dataset on the hub.")
    group.add_argument("--hf-split", help="Its split; train when absent.")


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default="ttft,tpot,itl",
        help=f"Metrics to report, with commas between: {', '.join(METRICS)}.",
    )
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default="99", help="Percentiles, such as 25,50,99.9."
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        type=_goal,
        metavar="METRIC:MS",
        help=f"Goals of {', '.join(SLO_METRICS)} in milliseconds; requests that meet them all are counted.",
    )
    group.add_argument("--save-result", action="store_true", help="Write a JSON file.")
    group.add_argument(
        "--save-detailed", action="store_true", help="With lengths, times, text and error of each request."
    )
    group.add_argument(
        "--metadata",
        nargs="+",
        type=_pair,
        metavar="KEY=VALUE",
        help="Put into the file; figures of the run are kept.",
    )
    group.add_argument("--result-dir", default=".", help="Directory of the files.")
    group.add_argument(
        "--result-filename", help="Name of the JSON file; backend, rate, model and date when absent."
    )


def _at_least(kind: Callable[[str], N], least: N) -> Callable[[str], N]:
    def parse(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is too small: {least} at least")
        return value

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no metric: choose from {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers with commas between, such as 25,50,99") from None
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: percentiles lie between 0 and 100")
    return values


def _goal(text: str) -> tuple[str, float]:
    name, colon, limit = text.partition(":")
    if not colon or name not in SLO_METRICS:
        raise argparse.ArgumentTypeError(f"{text!r}: METRIC:MS with a metric of {', '.join(SLO_METRICS)}")
    return name, _positive(limit)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE")
    return key, value
