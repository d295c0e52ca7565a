"""Shared by the offline benchmarks: the engine, and timed requests."""

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from atom import EngineArgs, LLMEngine, SamplingParams
from atom.benchmarks.serving.prompts import Ids, random_ids
from atom.shared.config.cli import CommandLineParser
from atom.shared.outputs import Sequence

__all__ = [
    "Run",
    "benchmark_parser",
    "fixed_length",
    "forced_acceptance",
    "random_prompts",
    "running_engine",
    "timed",
]


@dataclass(frozen=True)
class Run:
    """Requests that started together, in the order of the prompts, with `n` sequences each."""

    seconds: float
    """From the first submission to the last token."""
    sequences: list[Sequence]

    @property
    def input_tokens(self) -> int:
        """Prompt tokens; every sequence counts its prompt."""
        return sum(len(sequence.prompt_token_ids) for sequence in self.sequences)

    @property
    def output_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


def benchmark_parser(name: str, description: str | None) -> tuple[CommandLineParser, argparse._ArgumentGroup]:
    """A parser with all engine flags, and the group for the benchmark's flags."""
    parser = CommandLineParser(
        prog=f"benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("benchmark")
    EngineArgs.add_cli_args(parser)
    return parser, group


@contextlib.contextmanager
def running_engine(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[LLMEngine]:
    """The engine of the flags; an invalid value ends the process with exit status 2."""
    try:
        given = EngineArgs.from_cli_args(args)
    except ValueError as error:
        parser.error(str(error))
    with given.create_engine() as engine:
        yield engine


def forced_acceptance(args: argparse.Namespace) -> dict[str, float]:
    """What a result says of acceptance that the engine's flags force; empty if they do not."""
    given = vars(args)  # a flag that was not given may be missing
    flags = {
        "forced_acceptance_length": given.get("spec_decode_acceptance_length"),
        "forced_acceptance_rate": given.get("spec_decode_acceptance_rate"),
    }
    return {name: value for name, value in flags.items() if value is not None}


def random_prompts(engine: LLMEngine, rng: np.random.Generator, count: int, length: int) -> list[Ids]:
    """Prompts of random token ids."""
    return random_ids(rng, np.arange(engine.checkpoint.vocab_size), [length] * count)


def fixed_length(output_len: int, n: int = 1, temperature: float = 1.0) -> SamplingParams:
    """Parameters for exactly `output_len` tokens."""
    return SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True, n=n)


def timed(
    engine: LLMEngine,
    prompts: list[str] | list[Ids],
    params: list[SamplingParams],
    phase: str = "",
    predictions: list[Ids] | None = None,
) -> Run:
    """Run requests that start together; `phase` is the title of a progress bar on a terminal.

    Raises RuntimeError if a request fails or ends early.
    """
    count = sum(one.n for one in params)
    hidden = None if phase else True  # None: shown on a terminal only
    with tqdm(total=count, desc=phase, unit="request", leave=False, disable=hidden) as bar:
        started = time.perf_counter()
        ids = engine.add_request(prompts, params, predictions=predictions)
        done: dict[int, Sequence] = {}
        while len(done) < count:
            ended = engine.step()
            done.update((sequence.request_id, sequence) for sequence in ended)
            bar.update(len(ended))
        seconds = time.perf_counter() - started
    run = Run(seconds, [done[request_id] for request_id in ids])
    _check(run, [one.max_tokens for one in params for _ in range(one.n)])
    return run


def _check(run: Run, wanted: list[int | None]) -> None:
    failed = [sequence.error for sequence in run.sequences if sequence.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(run.sequences)} requests failed: {failed[0]}")
    found = [len(sequence.token_ids) for sequence in run.sequences]
    if found != wanted:
        raise RuntimeError(f"expected {sum(count or 0 for count in wanted)} tokens, got {sum(found)}")
