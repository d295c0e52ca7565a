"""Measures speculative decoding on a copying task: tokens per step, and the speed-up over the plain run.

    python -m benchmarks.speculation --model PATH --method ngram --num-speculative-tokens 4

The requests of a batch start together, with random prompts; tokens are greedy. The plain run shows what
the model writes. The run with drafts then gets this text as the prediction of each request, with a wrong
token at regular places, like a summary that quotes. So the task needs no trained weights, and the share
of copied text is known. With --load-dummy the weights are random. In bfloat16 some outputs may differ
from the plain run's by rounding, and are copied less from there on.
"""

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from atom import EngineArgs, LLMEngine
from atom.benchmarks.serving.prompts import Ids
from atom.shared.config.cli import CommandLineParser
from atom.shared.config.speculative import SpeculativeConfig
from benchmarks.common.arguments import add_output_flag, not_negative, positive, single_line_errors
from benchmarks.common.offline import Run, benchmark_parser, fixed_length, random_prompts, timed
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
    plain = replace(given, config=replace(given.config, speculative=SpeculativeConfig()))
    with plain.create_engine() as engine:
        rng = np.random.default_rng(args.seed)
        prompts = {size: random_prompts(engine, rng, size, args.input_len) for size in args.batch_sizes}
        outputs = {size: _fastest(engine, batch, args) for size, batch in prompts.items()}
    rows = []
    with given.create_engine() as engine:
        for size, batch in prompts.items():
            wanted = [list(sequence.token_ids) for sequence in outputs[size].sequences]
            predictions = [
                _prediction(prompt, ids, args.mistake_every)
                for prompt, ids in zip(batch, wanted, strict=True)
            ]
            before = engine.stats()
            run = _fastest(engine, batch, args, predictions)
            after = engine.stats()
            generated = after.generated_tokens - before.generated_tokens
            accepted = _accepted(after) - _accepted(before)
            found = [list(sequence.token_ids) for sequence in run.sequences]
            rows.append(
                {
                    "batch_size": size,
                    "plain_seconds": outputs[size].seconds,
                    "seconds": run.seconds,
                    "speed_up": outputs[size].seconds / run.seconds,
                    "tokens_per_step": generated / (generated - accepted),
                    "draft_tokens": after.num_draft_tokens - before.num_draft_tokens,
                    "accepted_tokens": accepted,
                    "same_outputs": sum(a == b for a, b in zip(found, wanted, strict=True)),
                }
            )
        gpus = engine.gpu_names
    settings = {name: getattr(args, name) for name in ("input_len", "output_len", "mistake_every")}
    drafts = given.config.speculative.num_speculative_tokens
    return gpus, {**settings, "drafts": drafts, "rows": rows}


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


def _accepted(stats: Any) -> int:
    return sum(stats.num_accepted_tokens_per_pos)


def text(result: dict[str, Any]) -> str:
    """The figures as a table."""
    titles = ("batch", "plain s", "drafts s", "speed-up", "tokens/step", "same outputs")
    lines = ["".join(f"{title:>13}" for title in titles)]
    for row in result["rows"]:
        numbers = (row["plain_seconds"], row["seconds"], row["speed_up"], row["tokens_per_step"])
        same = f"{row['same_outputs']}/{row['batch_size']}"
        lines.append(f"{row['batch_size']:>13}{''.join(f'{number:>13.2f}' for number in numbers)}{same:>13}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
