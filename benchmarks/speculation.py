"""Measures speculative decoding: time per token and tokens per step, compared with the plain run.

    python -m benchmarks.speculation --model PATH --method ngram --num-speculative-tokens 4
    python -m benchmarks.speculation --model benchmarks/models/Qwen3-8B --load-dummy --method eagle3 \\
        --draft-model benchmarks/heads/Qwen3-8B-EAGLE3 --num-speculative-tokens 3 \\
        --spec-decode-acceptance-length 2.88 --batch-sizes 1 8 64

The requests of a batch start together, with random prompts; tokens are greedy. The plain run comes first,
then the same requests run with drafts. What is accepted is chosen in one of three ways:

copied text  methods that read the text (ngram): the plain run's output is the prediction of each request,
             with a wrong token at regular places, like a summary that quotes. Needs no trained weights.
forced       --spec-decode-acceptance-length or -rate: as many drafts as these say, for random weights
verified     otherwise: what the models agree on, for trained weights

Without forced acceptance both runs have the same outputs, but for rounding: in bfloat16 some may differ, and
are copied less from there on.
"""

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from atom import EngineArgs, LLMEngine
from atom.benchmarks.serving.prompts import Ids
from atom.shared.config.cli import CommandLineParser
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.engine import CoreStats
from benchmarks.common.arguments import add_output_flag, not_negative, positive, single_line_errors
from benchmarks.common.offline import (
    Run,
    benchmark_parser,
    fixed_length,
    forced_acceptance,
    random_prompts,
    timed,
)
from benchmarks.common.report import report, write

_TAIL = 64
"""Last tokens of the prompt that precede the prediction, so that its beginning is found."""


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    try:
        given = EngineArgs.from_cli_args(args)
    except ValueError as error:
        parser.error(str(error))
    if given.config.speculative.method is None:
        parser.error("name the method to measure, for example --method ngram --num-speculative-tokens 4")
    with single_line_errors():
        result = report("speculation", *measure(given, args))
        print(text(result))
        write(args.output_json, result)


def _parser() -> CommandLineParser:
    parser, group = benchmark_parser("speculation", __doc__)
    add = group.add_argument
    add("--input-len", type=positive, default=256, help="tokens of each prompt")
    add("--output-len", type=positive, default=256, help="tokens generated for each request")
    add("--batch-sizes", type=positive, nargs="+", default=[1, 16], help="requests that start together")
    add(
        "--mistake-every",
        type=not_negative,
        default=10,
        help="every so many predicted tokens one is wrong",
    )
    add("--num-iters", type=positive, default=3, help="timed iterations; the fastest counts")
    add("--seed", type=not_negative, default=0, help="seed of the prompts")
    add_output_flag(group)
    return parser


def measure(given: EngineArgs, args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The GPUs, and the figures of every batch size."""
    speculative = given.config.speculative
    copies = speculative.reads_text and speculative.forced_length is None
    plain = replace(given, config=replace(given.config, speculative=SpeculativeConfig()))
    with plain.create_engine() as engine:
        rng = np.random.default_rng(args.seed)
        prompts = {size: random_prompts(engine, rng, size, args.input_len) for size in args.batch_sizes}
        outputs = {size: _fastest(engine, batch, args) for size, batch in prompts.items()}
    rows = []
    with given.create_engine() as engine:
        for size, batch in prompts.items():
            wanted = [list(sequence.token_ids) for sequence in outputs[size].sequences]
            predictions = [_prediction(*each, args.mistake_every) for each in zip(batch, wanted, strict=True)]
            before = engine.stats()
            run = _fastest(engine, batch, args, predictions if copies else None)
            rows.append(row(size, outputs[size], run, before, engine.stats()))
        gpus = engine.gpu_names
    settings = {name: getattr(args, name) for name in ("input_len", "output_len")}
    if copies:
        settings["mistake_every"] = args.mistake_every
    return gpus, {
        "method": speculative.method,
        "drafts": speculative.num_speculative_tokens,
        **forced_acceptance(args),
        **settings,
        "rows": rows,
    }


def row(size: int, plain: Run, run: Run, before: CoreStats, after: CoreStats) -> dict[str, Any]:
    """The figures of a batch size; `before` and `after` the runs with drafts.

    Tokens per step are the tokens of a row whose drafts a step verified.
    """
    drafts = after.num_drafts - before.num_drafts
    accepted = _accepted(after) - _accepted(before)
    found = [sequence.token_ids for sequence in run.sequences]
    wanted = [sequence.token_ids for sequence in plain.sequences]
    return {
        "batch_size": size,
        "plain_seconds": plain.seconds,
        "seconds": run.seconds,
        "speed_up": plain.seconds / run.seconds,
        "plain_tpot": _tpot(plain),
        "tpot": _tpot(run),
        "tpot_ratio": _tpot(run) / _tpot(plain),
        "tokens_per_step": 1 + accepted / drafts if drafts else 1.0,
        "draft_tokens": after.num_draft_tokens - before.num_draft_tokens,
        "accepted_tokens": accepted,
        "same_outputs": sum(a == b for a, b in zip(found, wanted, strict=True)),
    }


def _tpot(run: Run) -> float:
    """Seconds per token after the first of each request."""
    return float(np.mean([sequence.tpot for sequence in run.sequences]))


def _fastest(
    engine: LLMEngine, prompts: list[Ids], args: argparse.Namespace, predictions: list[Ids] | None = None
) -> Run:
    """The fastest of the iterations; one more comes before them, which also fills the prefix cache."""
    params = [fixed_length(args.output_len, temperature=0.0)] * len(prompts)
    runs = [timed(engine, prompts, params, predictions=predictions) for _ in range(args.num_iters + 1)]
    return min(runs[1:], key=lambda run: run.seconds)


def _prediction(prompt: Ids, output: Ids, mistake_every: int) -> Ids:
    wrong = [
        output[(at + 1) % len(output)] if mistake_every and at % mistake_every == mistake_every - 1 else token
        for at, token in enumerate(output)
    ]
    return [*prompt[-_TAIL:], *wrong]


def _accepted(stats: CoreStats) -> int:
    return sum(stats.num_accepted_tokens_per_pos)


def text(result: dict[str, Any]) -> str:
    """The figures as a table."""
    titles = (
        "batch",
        "plain s",
        "drafts s",
        "speed-up",
        "ms/token",
        "of plain",
        "tokens/step",
        "same outputs",
    )
    lines = ["".join(f"{title:>13}" for title in titles)]
    for each in result["rows"]:
        numbers = (
            each["plain_seconds"],
            each["seconds"],
            each["speed_up"],
            each["tpot"] * 1e3,
            each["tpot_ratio"],
            each["tokens_per_step"],
        )
        same = f"{each['same_outputs']}/{each['batch_size']}"
        lines.append(f"{each['batch_size']:>13}{''.join(f'{number:>13.2f}' for number in numbers)}{same:>13}")
    forced = [name for name in result if name.startswith("forced_")]
    lines += [
        f"{name.replace('_', ' ')} {result[name]:g}: the outputs are not the model's" for name in forced
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
