"""lm-eval's numbers through vLLM with ATOM's plugin and without it: they have to be equal.

The tasks are those of tests/accuracy, the model is the small real one.
"""

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.accuracy import compare
from tests.accuracy.results import TASKS, Run, compared, equal, read_run, text
from tests.helpers.smollm2 import gguf_path

DEADLINE_S = 1800
PROOF = "ATOM's LlamaForCausalLM"
"""What the plugin logs."""
_ENVIRONMENT = {"HF_DATASETS_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SWITCH = "ATOM_DISABLE_VLLM_PLUGIN"


def check_evaluation(python: str, environment: Mapping[str, str]) -> dict[str, list[str]]:
    """The problems of the comparison, by its name; `environment` is that of vLLM with the plugin."""
    command = Path(python).absolute().with_name("lm_eval")
    with compare.plain_directory(gguf_path()) as directory:
        alone, log_alone = run_tasks(command, directory, {**environment, SWITCH: "1"})
        plugin, log = run_tasks(command, directory, {**environment, SWITCH: "0"})
    wrong = []
    if PROOF not in log:
        wrong.append(f"the plugin did not run: no {PROOF!r} in its log")
    if PROOF in log_alone:
        wrong.append(f"{SWITCH}=1 did not disable the plugin")
    figures = compared(plugin, alone)
    if not equal(figures):
        wrong.append(text(figures))
    return {f"lm-eval, {', '.join(TASKS)}": wrong}


def run_tasks(command: Path, directory: str, environment: Mapping[str, str]) -> tuple[Run, str]:
    """What lm-eval wrote about the model, and the log. Raises RuntimeError with the log where it fails."""
    settings = f"pretrained={directory},dtype=float32,max_model_len=2048,enforce_eager=True,max_num_seqs=8"
    with tempfile.TemporaryDirectory() as output:
        done = subprocess.run(
            [command, "run", "--model", "vllm", "--model_args", settings, "--tasks", *TASKS,
             "--include_path", "tasks", "--output_path", output, "--log_samples"],
            cwd=Path(compare.__file__).parent,
            env={**environment, **_ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"lm-eval ended with exit status {done.returncode}:\n{done.stdout}")
        return read_run(Path(output)), done.stdout
