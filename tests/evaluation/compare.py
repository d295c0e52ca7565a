"""lm-eval's numbers for a server, beside those of its own transformers backend on the same model.

    python -m tests.evaluation.compare --lm-eval path/to/lm_eval

Runs a multiple-choice task (log probabilities) and a generation task (text) both ways in float32,
without a hub. Exit status 1 where a metric, an answer or a greedy flag differs, or a log probability
by more than the tolerance.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.server import running_server
from tests.helpers.smollm2 import gguf_path, prepared

TASKS = ("capitals", "sequences")
TOLERANCE = 1e-3
DEADLINE_S = 1200
_HERE = Path(__file__).parent


@dataclass
class Run:
    """What lm-eval wrote: metrics by task, and what the model said to each document of it."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    answers: dict[str, list[Any]] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lm-eval", required=True, help="the lm_eval command")
    command = os.path.abspath(parser.parse_args().lm_eval)
    directory = prepared().directory
    arguments = ("--model", gguf_path(), "--served-model-name", "smollm2", "--dtype", "float32")
    with running_server(*arguments, "--max-model-len", "2048") as server:
        served = lm_eval(
            command,
            "local-completions",
            f"model=smollm2,base_url={server.url}/v1/completions,num_concurrent=4,max_retries=1,"
            f"tokenizer_backend=huggingface,tokenizer={directory}",
        )
    reference = lm_eval(command, "hf", f"pretrained={directory},dtype=float32")
    return report(served, reference)


def lm_eval(command: str, model: str, model_args: str) -> Run:
    """One run of every task."""
    with tempfile.TemporaryDirectory() as output:
        subprocess.run(
            [command, "run", "--model", model, "--model_args", model_args, "--tasks", *TASKS,
             "--include_path", "tasks", "--device", "cpu", "--output_path", output, "--log_samples"],
            cwd=_HERE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
            timeout=DEADLINE_S,
            check=True,
        )  # fmt: skip
        return _read(Path(output))


def report(served: Run, reference: Run) -> int:
    """Print both columns; 1 if they differ."""
    faults = 0
    print(f"{'':32} {'server':>12} {'transformers':>12}")
    for task in TASKS:
        for metric, wanted in reference.metrics[task].items():
            found = served.metrics[task][metric]
            faults += found != wanted
            print(f"{task + ' ' + metric:32} {found:12.4f} {wanted:12.4f}")
    wanted_scores, scores = reference.answers["capitals"], served.answers["capitals"]
    assert len(scores) == len(wanted_scores) > 0
    worst = max(abs(a[0] - b[0]) for a, b in zip(scores, wanted_scores, strict=True))
    flags = sum(a[1] != b[1] for a, b in zip(scores, wanted_scores, strict=True))
    texts = sum(
        a != b for a, b in zip(served.answers["sequences"], reference.answers["sequences"], strict=True)
    )
    print(f"largest difference of {len(scores)} log probabilities: {worst:.1e} (tolerance {TOLERANCE:.0e})")
    print(f"greedy flags that differ: {flags}; generated texts that differ: {texts}")
    return 1 if faults or flags or texts or worst > TOLERANCE else 0


def _read(output: Path) -> Run:
    run = Run()
    (results,) = output.rglob("results_*.json")
    for task, metrics in json.loads(results.read_text())["results"].items():
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


if __name__ == "__main__":
    sys.exit(main())
