"""Measures drafts on texts: tokens per step, and time relative to the plain run, in alternating runs.

    python -m benchmarks.speculation_texts --model PATH --method ngram --num-speculative-tokens 4
    python -m benchmarks.speculation_texts --model PATH --first-layers 6 --num-speculative-tokens 2

The tasks: a text to be repeated, a question, and a JSON object of a schema; one greedy request at a time. Two
engines run, one with drafts and one without, and take turns. `--first-layers N` makes a draft model of the
model's first N layers; such a one is not trained for it, so that few of its drafts are right.

Times are those of a token: a step of several tokens may round in another way than one of a single token, and
so change an output where two tokens are nearly as likely. `same tokens` are those before; all with `--dtype
float32`. The CPU time of an engine depends less than its time on what else the machine does.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import takewhile
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


@dataclass(frozen=True)
class _Timed:
    """A request's output, and what it took."""

    token_ids: list[int]
    seconds: float
    cpu_seconds: float


def compared(task: str, engines: list[LLMEngine], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a task; `engines` without and with drafts."""
    question, schema = _TASKS[task]
    constraint = None if schema is None else StructuredOutputsParams(json=json.dumps(schema))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, structured_outputs=constraint)
    rounds: list[list[_Timed]] = []
    before = engines[1].stats()
    for _ in range(args.num_iters + 1):
        rounds.append([_timed(engine, question, params) for engine in engines])
    after = engines[1].stats()
    plain, drafted = zip(*rounds, strict=True)
    fastest = [min(each.seconds / len(each.token_ids) for each in timed) for timed in (plain, drafted)]
    least = [min(each.cpu_seconds / len(each.token_ids) for each in timed) for timed in (plain, drafted)]
    outputs = [timed[-1].token_ids for timed in (plain, drafted)]
    accepted = sum(after.num_accepted_tokens_per_pos) - sum(before.num_accepted_tokens_per_pos)
    tokens = after.generated_tokens - before.generated_tokens
    return {
        "task": task,
        "tokens": len(outputs[1]),
        "same_tokens": sum(takewhile(bool, (a == b for a, b in zip(*outputs, strict=False)))),
        "plain_ms": 1000 * fastest[0],
        "ms": 1000 * fastest[1],
        "speed_up": fastest[0] / fastest[1],
        "cpu_speed_up": least[0] / least[1],
        "tokens_per_step": tokens / (tokens - accepted),
        "draft_tokens": after.num_draft_tokens - before.num_draft_tokens,
        "accepted_tokens": accepted,
    }


def _timed(engine: LLMEngine, question: str, params: SamplingParams) -> _Timed:
    before = _cpu_seconds(engine)
    started = time.perf_counter()
    (output,) = engine.chat([{"role": "user", "content": question}], params)
    return _Timed(output["token_ids"], time.perf_counter() - started, _cpu_seconds(engine) - before)


def _cpu_seconds(engine: LLMEngine) -> float:
    """CPU time of the engine's processes so far."""
    ticks = 0
    for pid in engine.pids().values():
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def text(result: dict[str, Any]) -> str:
    """The figures as a table."""
    names = ["task", "tokens", "same_tokens", "plain_ms", "ms", "speed_up", "cpu_speed_up"]
    names += ["tokens_per_step", "draft_tokens"]
    lines = ["".join(f"{name.replace('_', ' '):>17}" for name in names)]
    for row in result["rows"]:
        cells = (row[name] for name in names)
        lines.append(
            "".join(f"{cell:>17.2f}" if isinstance(cell, float) else f"{cell:>17}" for cell in cells)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
