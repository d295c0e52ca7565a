"""Measures drafts on texts: tokens per step, and time relative to the plain run, in alternating runs.

    python -m benchmarks.speculation_texts --model PATH --method ngram --num-speculative-tokens 4
    python -m benchmarks.speculation_texts --model PATH --first-layers 6 --num-speculative-tokens 2

The tasks: a text to be repeated, a question, and a JSON object of a schema; one greedy request at a time. Two
engines run, one with drafts and one without, and take turns. `--first-layers N` makes a draft model of the
model's first N layers; such a one is not trained for it, so that few of its drafts are right.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from atom import EngineArgs, LLMEngine, SamplingParams
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.sampling_params import StructuredOutputsParams
from benchmarks.common.arguments import add_output_flag, positive, single_line_errors
from benchmarks.common.offline import benchmark_parser
from benchmarks.common.report import report, write

_TEXT = (
    "The garden at the old school had three gates. The first gate led to the orchard, the second to the "
    "pond, and the third to the road. Every morning the gardener opened the first gate, fed the hens, and "
    "wrote the weather into a small green book: wind, rain, sun and the height of the river in centimetres."
)
_PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "maxLength": 30},
        "is_member": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "age", "email", "is_member"],
    "additionalProperties": False,
}
_TASKS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "copy": (f"Repeat the following text word for word:\n\n{_TEXT}", None),
    "chat": ("What is the difference between a lake and a river? Answer in a short paragraph.", None),
    "json": (
        "Write a JSON list of four people with the keys first_name, last_name, age, email and is_member.",
        {"type": "array", "items": _PERSON, "minItems": 4, "maxItems": 4},
    ),
}
_END_LAYERS = ("model.embed_tokens.", "model.norm.", "lm_head.")


def main() -> None:
    parser, group = benchmark_parser("speculation_texts", __doc__)
    add = group.add_argument
    add("--tasks", choices=list(_TASKS), nargs="+", default=list(_TASKS), help="what to measure")
    add("--max-tokens", type=positive, default=128, help="most tokens of an output")
    add("--num-iters", type=positive, default=5, help="timed iterations of each task; the fastest counts")
    add("--first-layers", type=positive, help="draft with so many of the model's first layers")
    add_output_flag(group)
    args = parser.parse_args()
    with single_line_errors(), tempfile.TemporaryDirectory() as directory:
        if args.first_layers is not None:
            args.method = "draft_model"
            args.draft_model = str(first_layers(Path(args.model), args.first_layers, Path(directory)))
        try:
            given = EngineArgs.from_cli_args(args)
        except ValueError as error:
            parser.error(str(error))
        if given.config.speculative.method is None:
            parser.error("name what drafts: --method or --first-layers")
        result = report("speculation_texts", *measure(given, args))
        print(text(result))
        write(args.output_json, result)


def first_layers(model: Path, count: int, directory: Path) -> Path:
    """Save a checkpoint of the model's first `count` layers in `directory`, and return that.

    Raises ValueError for a model that is no directory with one model.safetensors, or has no more layers.
    """
    weights = model / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"--first-layers: {model} needs config.json and one model.safetensors")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if count >= config["num_hidden_layers"]:
        raise ValueError(f"--first-layers {count}: the model has {config['num_hidden_layers']} layers")
    kept = tuple(f"model.layers.{layer}." for layer in range(count)) + _END_LAYERS
    with safe_open(weights, "pt") as file:
        names = [name for name in file.keys() if name.startswith(kept)]  # noqa: SIM118 - it is no mapping
        tensors = {name: file.get_tensor(name) for name in names}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    changed = config | {"num_hidden_layers": count}
    (directory / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    return directory


def measure(given: EngineArgs, args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The GPUs, and the figures of every task."""
    plain = replace(given, config=replace(given.config, speculative=SpeculativeConfig()))
    speculative = given.config.speculative
    with ExitStack() as stack:
        engines = [stack.enter_context(each.create_engine()) for each in (plain, given)]
        rows = [compared(task, engines, args) for task in args.tasks]
        gpus = engines[0].gpu_names
    return gpus, {
        "method": speculative.method,
        "drafts": speculative.num_speculative_tokens,
        "first_layers": args.first_layers,
        "rows": rows,
    }


def compared(task: str, engines: list[LLMEngine], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a task; `engines` without and with drafts.

    Raises RuntimeError if their outputs differ.
    """
    question, schema = _TASKS[task]
    constraint = None if schema is None else StructuredOutputsParams(json=json.dumps(schema))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, structured_outputs=constraint)
    conversation = [{"role": "user", "content": question}]
    fastest = [float("inf")] * 2
    outputs: list[list[int]] = [[], []]
    before = engines[1].stats()
    for _ in range(args.num_iters + 1):
        for number, engine in enumerate(engines):
            started = time.perf_counter()
            (output,) = engine.chat(conversation, params)
            seconds = time.perf_counter() - started
            outputs[number] = output["token_ids"]
            fastest[number] = min(fastest[number], seconds)
    if outputs[0] != outputs[1]:
        raise RuntimeError(f"{task}: the drafts have changed the output")
    after = engines[1].stats()
    accepted = sum(after.num_accepted_tokens_per_pos) - sum(before.num_accepted_tokens_per_pos)
    tokens = after.generated_tokens - before.generated_tokens
    return {
        "task": task,
        "tokens": len(outputs[1]),
        "plain_seconds": fastest[0],
        "seconds": fastest[1],
        "speed_up": fastest[0] / fastest[1],
        "tokens_per_step": tokens / (tokens - accepted),
        "draft_tokens": after.num_draft_tokens - before.num_draft_tokens,
        "accepted_tokens": accepted,
    }


def text(result: dict[str, Any]) -> str:
    """The figures as a table."""
    names = ("task", "tokens", "plain_seconds", "seconds", "speed_up", "tokens_per_step", "draft_tokens")
    lines = ["".join(f"{name.replace('_', ' '):>17}" for name in names)]
    for row in result["rows"]:
        cells = (row[name] for name in names)
        lines.append(
            "".join(f"{cell:>17.2f}" if isinstance(cell, float) else f"{cell:>17}" for cell in cells)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
