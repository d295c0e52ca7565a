"""What lm-eval wrote about two backends, side by side."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TASKS = ("capitals", "sequences")
TOLERANCE = 1e-3


@dataclass
class Run:
    """What lm-eval wrote: metrics by task, and what the model said to each document of it.

    A choice is a log probability and whether it is the greedy text, a generation is a text.
    """

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    answers: dict[str, list[Any]] = field(default_factory=dict)
    harness: str = ""
    """Versions of what asked."""


def read_run(output: Path) -> Run:
    """From lm-eval's --output_path, written with --log_samples."""
    run = Run()
    (results,) = output.rglob("results_*.json")
    content = json.loads(results.read_text())
    run.harness = f"lm-eval {content['lm_eval_version']}, transformers {content['transformers_version']}"
    for task, metrics in content["results"].items():
        run.metrics[task] = {
            name.partition(",")[0]: value
            for name, value in metrics.items()
            if isinstance(value, float) and "stderr" not in name
        }
    for task in TASKS:
        (samples,) = output.rglob(f"samples_{task}_*.jsonl")
        documents = [json.loads(line) for line in samples.read_text().splitlines()]
        documents.sort(key=lambda document: document["doc_id"])
        run.answers[task] = [_plain(answer) for document in documents for answer in document["resps"]]
    return run


def _plain(answer: Any) -> Any:
    """lm-eval keeps a list of answers to each request; log probabilities come as text."""
    (only,) = answer
    if isinstance(only, str):
        return only
    value, greedy = only
    return float(value), str(greedy) == "True"


def compared(served: Run, reference: Run, as_file: Run | None = None) -> dict[str, Any]:
    """Metrics of all, and how many answers differ. Raises ValueError for runs of different tasks.

    `as_file`: the server with the quantized file, whose metrics are stated and not compared.
    """
    rows = [
        {"task": task, "metric": metric, "server": served.metrics[task][metric], "transformers": wanted}
        for task in TASKS
        for metric, wanted in reference.metrics[task].items()
    ]
    pairs = [
        pair for task in TASKS for pair in zip(served.answers[task], reference.answers[task], strict=True)
    ]
    texts = [pair for pair in pairs if isinstance(pair[0], str)]
    scores = [pair for pair in pairs if not isinstance(pair[0], str)]
    if not (rows and texts and scores):
        raise ValueError("lm-eval wrote no metrics, no texts or no log probabilities")
    if as_file is not None:
        for row in rows:
            row["file"] = as_file.metrics[row["task"]][row["metric"]]
    return {
        "harness": reference.harness,
        "rows": rows,
        "answers": len(pairs),
        "scores": len(scores),
        "different_texts": sum(mine != wanted for mine, wanted in texts),
        "different_flags": sum(mine[1] != wanted[1] for mine, wanted in scores),
        "largest_difference": max(abs(mine[0] - wanted[0]) for mine, wanted in scores),
    }


def equal(result: dict[str, Any]) -> bool:
    """Whether the server answers as transformers does."""
    same = all(row["server"] == row["transformers"] for row in result["rows"])
    different = result["different_texts"] or result["different_flags"]
    return bool(same and not different and result["largest_difference"] <= TOLERANCE)


def text(result: dict[str, Any]) -> str:
    """A column for each run."""
    columns = [name for name in result["rows"][0] if name not in ("task", "metric")]
    lines = [" " * 24 + "".join(f"{column:>13}" for column in columns)]
    for row in result["rows"]:
        figures = "".join(f"{row[column]:13.4f}" for column in columns)
        lines.append(f"{row['task'] + ' ' + row['metric']:24}{figures}")
    lines.append(
        f"largest difference of {result['scores']} log probabilities: {result['largest_difference']:.1e} "
        f"(tolerance {TOLERANCE:.0e})"
    )
    lines.append(
        f"greedy flags that differ: {result['different_flags']}; "
        f"generated texts that differ: {result['different_texts']} of {result['answers'] - result['scores']}"
    )
    return "\n".join(lines)
