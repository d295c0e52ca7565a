"""The command line of the agentic benchmark."""

import argparse
import dataclasses
from pathlib import Path

from atom.benchmarks.agentic.sessions import LogNormal, SessionModel
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.flag_values import add_metric_flags, at_least, positive
from atom.benchmarks.serving.tokenizer import MODES
from atom.shared.config.cli import CommandLineParser

__all__ = ["BACKENDS", "check", "make_parser", "session_model"]

BACKENDS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}
"""Their paths: conversations as messages, or as token ids."""


def make_parser() -> argparse.ArgumentParser:
    """The parser with all flags."""
    parser = CommandLineParser(
        prog="atom.benchmarks.agentic",
        description="Run sessions of coding agents against a running OpenAI-compatible server.",
    )
    _add_server(parser)
    _add_sessions(parser)
    _add_load(parser)
    _add_results(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    """Set defaults that depend on other flags. Raises BenchmarkError for flags that conflict."""
    if args.sweep and args.max_concurrency is not None:
        raise BenchmarkError("--sweep sets the concurrency: omit --max-concurrency")
    if args.sweep and args.trace is not None:
        raise BenchmarkError("--sweep needs new sessions for each run, and --trace has one set: omit one")
    if args.trace is not None and args.save_trace is not None:
        raise BenchmarkError("--save-trace writes drawn sessions, and --trace reads sessions: omit one")
    args.endpoint = args.endpoint or BACKENDS[args.backend]
    args.result_prefix = args.result_filename and args.result_filename.removesuffix(".json")


def session_model(args: argparse.Namespace) -> SessionModel:
    """The distributions of the flags."""
    model = SessionModel()

    def scaled(drawn: LogNormal, median: float | None) -> LogNormal:
        return drawn if median is None else dataclasses.replace(drawn, median=median)

    return dataclasses.replace(
        model,
        shared_tokens=args.shared_tokens,
        first_input=scaled(model.first_input, args.first_input_tokens),
        input=scaled(model.input, args.input_tokens),
        output=scaled(model.output, args.output_tokens),
        pause_s=scaled(model.pause_s, args.pause),
        max_context=args.max_context,
        fork_probability=args.fork_probability,
        session_rate=args.session_rate,
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend", default="openai-chat", choices=sorted(BACKENDS), help="Messages of a chat, or token ids."
    )
    group.add_argument("--base-url", help="Such as http://host:port; replaces --host and --port.")
    group.add_argument("--host", default="127.0.0.1", help="Address of the server.")
    group.add_argument("--port", type=at_least(int, 1), default=8000, help="Its HTTP port.")
    group.add_argument("--endpoint", help="Path of the requests. If unset: that of OpenAI.")
    group.add_argument("--model", required=True, help="Name or path of the model and its tokenizer.")
    group.add_argument("--served-model-name", help="Name of the model on the server, if different.")
    group.add_argument("--tokenizer", help="Name or path of the tokenizer. If unset: --model.")
    group.add_argument("--tokenizer-mode", default="auto", choices=MODES, help="Kind of tokenizer.")
    group.add_argument("--trust-remote-code", action="store_true", help="Run the tokenizer's own code.")
    group.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="Let replies end early. If unset: they have their drawn length.",
    )


def _add_sessions(parser: argparse.ArgumentParser) -> None:
    model = SessionModel()
    group = parser.add_argument_group("sessions")
    group.add_argument(
        "--trace", type=Path, help="Sessions from this file of JSON lines instead of drawn ones."
    )
    group.add_argument("--save-trace", type=Path, help="Write the drawn sessions to this file.")
    group.add_argument("--num-sessions", type=at_least(int, 1), default=32, help="Sessions, without forks.")
    group.add_argument(
        "--max-context",
        type=at_least(int, 1),
        default=model.max_context,
        help="Most tokens of a prompt and its reply.",
    )
    group.add_argument(
        "--shared-tokens",
        type=at_least(int, 0),
        default=model.shared_tokens,
        help="Tokens that all sessions begin with: system prompt and tools.",
    )
    group.add_argument(
        "--first-input-tokens",
        type=positive,
        help="Median tokens of a session's first input, such as a conversation that goes on.",
    )
    group.add_argument("--input-tokens", type=positive, help="Median tokens that a later turn adds.")
    group.add_argument("--output-tokens", type=positive, help="Median tokens of a reply.")
    group.add_argument("--pause", type=positive, help="Median seconds from a reply to the next turn.")
    group.add_argument(
        "--fork-probability",
        type=_probability,
        default=model.fork_probability,
        help="Of a fork after each turn.",
    )
    group.add_argument("--seed", type=at_least(int, 0), default=0, help="Seed of sessions and tokens.")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--max-concurrency", type=at_least(int, 1), help="Most sessions that run at once.")
    group.add_argument(
        "--session-rate",
        type=positive,
        default=float("inf"),
        help="Sessions that start in a second; inf: all at once.",
    )
    group.add_argument("--duration", type=positive, help="No turn begins after that many seconds.")
    group.add_argument(
        "--sweep",
        type=at_least(int, 1),
        nargs="+",
        metavar="CONCURRENCY",
        help="One run per concurrency with sessions of its own, then a table and a plot.",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="Do not show a progress bar.")


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    add_metric_flags(group, "90,99")
    group.add_argument("--num-gpus", type=at_least(int, 1), help="GPUs of the server, for figures per GPU.")
    group.add_argument(
        "--save-result", action="store_true", help="Write a JSON file with each session's figures."
    )
    group.add_argument("--result-dir", default=".", help="Directory for the files.")
    group.add_argument("--result-filename", help="Name of the JSON file. If unset: model and date.")


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 1")
    return value
