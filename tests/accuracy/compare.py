"""lm-eval's numbers for a server, and those of its own transformers backend on the same model.

    python -m tests.accuracy.compare --lm-eval path/to/lm_eval

Runs a multiple-choice task (log probabilities) and a generation task (text) both ways in float32,
without a hub; the server is asked as users ask it. Exit status 1 where a metric, an answer or a
greedy flag differs, or a log probability by more than the tolerance.

A GGUF file is expanded for both. Then the server is asked once more, with the file itself and as
`make serve` runs it: its integers are multiplied by rounded activations, so that its metrics may differ.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.config.cli import CommandLineParser
from atom.shared.config.model import ModelConfig
from atom.supervisor import Supervisor
from benchmarks.common.arguments import add_output_flag, single_line_errors
from benchmarks.common.report import report, write
from tests.accuracy.results import TASKS, Run, compared, equal, read_run, text
from tests.helpers.checkpoints.smollm2 import gguf_path
from tests.helpers.servers.server import running_server

DEADLINE_S = 1800
MODULE = "tests.accuracy.compare"
_HERE = Path(__file__).parent


def main() -> int:
    args = _parser().parse_args()
    with single_line_errors():
        figures = compare(_command(args.lm_eval), args.model or gguf_path(), args.num_concurrent)
        command = f"python -m {MODULE} --lm-eval lm_eval --model {figures['model']}"
        result = report("accuracy", [], figures, command)
        print(text(result))
        write(args.output_json, result)
    return 0 if equal(result) else 1


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog=MODULE, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lm-eval", required=True, help="the lm_eval command")
    add("--model", help="directory or .gguf file; SmolLM2-135M-Instruct when absent")
    add("--num-concurrent", type=int, default=8, help="requests that lm-eval sends at once")
    add_output_flag(parser)
    return parser


def _command(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise BenchmarkError(f"--lm-eval {name}: no such command; `make accuracy` installs it")
    return os.path.abspath(found)


def compare(command: str, model: str, concurrent: int) -> dict[str, Any]:
    """The runs, and how they differ."""
    with plain_directory(model) as directory:
        served = ask_server(command, directory, directory, concurrent, "--dtype", "float32")
        reference = lm_eval(command, "hf", f"pretrained={directory},dtype=float32")
        is_file = model.endswith(".gguf")
        as_file = ask_server(command, model, directory, concurrent) if is_file else None
    return {"model": Path(model).stem, "dtype": "float32", **compared(served, reference, as_file)}


@contextlib.contextmanager
def plain_directory(model: str) -> Iterator[str]:
    """The model as a directory that transformers reads: a GGUF file is expanded, in a process of its own."""
    if not model.endswith(".gguf"):
        with Supervisor() as supervisor:
            yield supervisor.prepare(ModelConfig(model=model))[0].directory
        return
    with tempfile.TemporaryDirectory() as made:
        directory = f"{made}/{Path(model).stem}"
        expanding = [sys.executable, "-m", "tools.expand_gguf", model, directory]
        if subprocess.run(expanding, timeout=DEADLINE_S).returncode:
            raise BenchmarkError(f"{model} cannot be expanded")
        yield directory


def ask_server(command: str, model: str, directory: str, concurrent: int, *flags: str) -> Run:
    """One run with a server of the model.

    Served under the name of a directory, the model's name tells lm-eval where its tokenizer is.
    """
    flags = ("--max-model-len", "2048", "--device", "cpu", *flags)
    with running_server("--model", model, "--served-model-name", directory, *flags) as server:
        return ask(command, server.url, directory, concurrent)


def ask(command: str, url: str, directory: str, concurrent: int) -> Run:
    """One run with a ready server, whose model has a directory's name."""
    return lm_eval(
        command,
        "local-completions",
        f"model={directory},base_url={url}/v1/completions,num_concurrent={concurrent},"
        "max_retries=3,tokenized_requests=False",
    )


def lm_eval(command: str, model: str, model_args: str) -> Run:
    """One run of every task."""
    with tempfile.TemporaryDirectory() as output:
        done = subprocess.run(
            [command, "run", "--model", model, "--model_args", model_args, "--tasks", *TASKS,
             "--include_path", "tasks", "--device", "cpu", "--output_path", output, "--log_samples"],
            cwd=_HERE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
            timeout=DEADLINE_S,
        )  # fmt: skip
        if done.returncode:
            raise BenchmarkError(f"lm-eval on {model} ended with exit status {done.returncode}")
        return read_run(Path(output))


if __name__ == "__main__":
    sys.exit(main())
