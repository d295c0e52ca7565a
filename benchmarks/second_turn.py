"""The next turn of long conversations after a restart: its first token with blocks from disk, and without.

    python -m benchmarks.second_turn --model PATH --context 32768 --kv-offload-dir DIR --kv-offload-disk 8G

An engine answers the first turn of --rounds conversations and ends. Their files leave the page cache. A
second engine gets the next turns, which find their blocks on disk, in alternation with other prompts of the
same length, of which it computes all. Prompts are random token ids.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atom import LLMEngine
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.prompts import Ids
from atom.shared.config.cli import CommandLineParser
from atom.shared.messages.kv_tiers import DISK
from benchmarks.common.arguments import add_output_flag, positive, single_line_errors
from benchmarks.common.offline import benchmark_parser, fixed_length, random_prompts, running_engine, timed
from benchmarks.common.report import report, write

_STORED_DEADLINE_S = 300.0
_POLL_S = 0.5
_LEAST_FOUND = 0.9


@dataclass(frozen=True)
class FirstToken:
    """The first token of one prompt."""

    seconds: float
    """Time from the submission of the prompt."""
    found: float
    """Fraction of the prompt that was in the prefix cache."""


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if getattr(args, "kv_offload_dir", None) is None:
        parser.error("--kv-offload-dir and --kv-offload-disk: where blocks are kept over the restart")
    with single_line_errors():
        with running_engine(parser, args) as engine:
            turns = first_turns(engine, args)
        drop_page_cache(Path(args.kv_offload_dir))
        with running_engine(parser, args) as engine:
            pairs = next_turns(engine, turns, args)
            gpus = engine.gpu_names
        result = report("second_turn", gpus, figures(pairs, args))
        print(text(result))
        write(args.output_json, result)


def _parser() -> CommandLineParser:
    parser, group = benchmark_parser("second_turn", __doc__)
    add = group.add_argument
    add("--context", type=positive, default=32_768, help="tokens of a first turn's prompt")
    add("--output-len", type=positive, default=16, help="tokens of its reply")
    add("--input-len", type=positive, default=256, help="tokens that the next turn adds")
    add("--rounds", type=positive, default=3, help="conversations; a figure is their median")
    add_output_flag(group)
    return parser


def first_turns(engine: LLMEngine, args: argparse.Namespace) -> list[Ids]:
    """The conversations after their first turns, once their blocks are on disk. Raises BenchmarkError."""
    rng = np.random.default_rng(0)
    turns = []
    for prompt in random_prompts(engine, rng, args.rounds, args.context):
        (reply,) = timed(engine, [prompt], [fixed_length(args.output_len)]).sequences
        turns.append([*prompt, *reply.token_ids])
    wanted = args.rounds * ((args.context + args.output_len - 1) // engine.config.block_tokens)
    deadline = time.monotonic() + _STORED_DEADLINE_S
    while (stored := blocks_on_disk(engine)) < wanted:
        if time.monotonic() > deadline:
            raise BenchmarkError(
                f"{stored} of {wanted} blocks are on disk after {_STORED_DEADLINE_S:g} s: raise "
                "--kv-cache-memory-bytes, or see the log"
            )
        time.sleep(_POLL_S)
    return turns


def blocks_on_disk(engine: LLMEngine) -> int:
    """Blocks that were stored since the start of the engine."""
    return sum(tier.stored for tier in engine.stats().kv_tiers if tier.medium == DISK)


def drop_page_cache(directory: Path) -> None:
    """Let the files be read from their device."""
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)  # what is not written stays in memory
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def next_turns(
    engine: LLMEngine, turns: list[Ids], args: argparse.Namespace
) -> list[tuple[FirstToken, FirstToken]]:
    """(from disk, computed) of each conversation. Raises BenchmarkError if blocks are not found."""
    rng = np.random.default_rng(1)
    _first_token(engine, random_prompts(engine, rng, 1, args.input_len)[0])
    pairs = []
    for turn in turns:
        (added,) = random_prompts(engine, rng, 1, args.input_len)
        (other,) = random_prompts(engine, rng, 1, len(turn) + args.input_len)
        pair = _first_token(engine, [*turn, *added]), _first_token(engine, other)
        least = _LEAST_FOUND * args.context / (len(turn) + args.input_len)
        if pair[0].found < least:
            raise BenchmarkError(
                f"{pair[0].found:.0%} of a conversation was found: raise --kv-offload-disk or "
                "--kv-cache-memory-bytes, or see the log"
            )
        pairs.append(pair)
    return pairs


def _first_token(engine: LLMEngine, prompt: Ids) -> FirstToken:
    (sequence,) = timed(engine, [prompt], [fixed_length(1)]).sequences
    return FirstToken(sequence.ttft, sequence.num_cached_tokens / len(prompt))


def figures(pairs: list[tuple[FirstToken, FirstToken]], args: argparse.Namespace) -> dict[str, Any]:
    """In seconds; `ratio` is that of the medians."""
    from_disk = [disk.seconds for disk, _ in pairs]
    computed = [other.seconds for _, other in pairs]
    return {
        "context": args.context,
        "output_len": args.output_len,
        "input_len": args.input_len,
        "from_disk": from_disk,
        "computed": computed,
        "found": statistics.median(disk.found for disk, _ in pairs),
        "ratio": statistics.median(from_disk) / statistics.median(computed),
    }


def text(result: dict[str, Any]) -> str:
    """The figures as text."""
    return "\n".join(
        [
            f"{'first token, s':<16}{'median':>9}   each",
            *(
                f"{title:<16}{statistics.median(result[name]):>9.3f}   "
                + " ".join(f"{seconds:.3f}" for seconds in result[name])
                for title, name in (("blocks on disk", "from_disk"), ("computed", "computed"))
            ),
            f"ratio {result['ratio']:.3f}; {result['found']:.1%} of the prompts were found",
        ]
    )


if __name__ == "__main__":
    main()
