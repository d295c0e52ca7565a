"""vLLM with ATOM's plugin against vLLM alone, on one machine, with dummy weights.

    python -m benchmarks.plugin_speed benchmarks/models/Qwen3-8B benchmarks/models/Qwen3-30B-A3B

Runs in an environment that has vLLM and, in it, ATOM (docs/use/plugins.md). For each model an engine without
the plugin runs, then one with it; each is a process of its own. All import vLLM at once, before the first
engine starts.

    decode      milliseconds of a step of B requests: (T(129 tokens) - T(1 token)) / 128
    prefill     prompt tokens a second of 16 prompts of 4096 tokens
    throughput  generated tokens a second of 256 requests of 512 tokens in and 256 out

A row is the median of its repetitions, after one that is not timed. An engine is killed when its share of
--seconds is over; its later rows are missing then. Prompts are random token ids; tokens are greedy, as ids.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import positive

DISABLE = "ATOM_DISABLE_VLLM_PLUGIN"
ALONE = "alone"
PLUGIN = "plugin"
Generate = Callable[[int, int, int], float]
"""Seconds of so many requests of so many tokens in and out."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    unit: str
    requests: int
    tokens_in: int
    measure: Callable[["Row", Generate], float]
    repetitions: int
    higher_is_better: bool = False

    def value(self, generate: Generate) -> float:
        """The median of the repetitions, after one that is not timed."""
        return statistics.median([self.measure(self, generate) for _ in range(self.repetitions + 1)][1:])


def _step_ms(row: Row, generate: Generate) -> float:
    first = generate(row.requests, row.tokens_in, 1)
    return (generate(row.requests, row.tokens_in, 129) - first) / 128 * 1000


def _prompt_rate(row: Row, generate: Generate) -> float:
    return row.requests * row.tokens_in / generate(row.requests, row.tokens_in, 1)


def _output_rate(row: Row, generate: Generate) -> float:
    return row.requests * 256 / generate(row.requests, row.tokens_in, 256)


ROWS = (
    Row("decode 1", "ms", 1, 128, _step_ms, 3),
    Row("decode 64", "ms", 64, 32, _step_ms, 3),
    Row("decode 256", "ms", 256, 32, _step_ms, 3),
    Row("prefill 16 x 4096", "tok/s", 16, 4096, _prompt_rate, 2, higher_is_better=True),
    Row("throughput 256 x 512/256", "tok/s", 256, 512, _output_rate, 1, higher_is_better=True),
)


@dataclass(frozen=True)
class Engine:
    """A child process that has one engine, and what it measures."""

    model: str
    variant: str
    process: "subprocess.Popen[str]"

    def figures(self, seconds: float) -> dict[str, float]:
        """Start the engine and print its lines; kills it after so many seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        found: dict[str, float] = {}
        limit = threading.Timer(seconds, self.kill)
        limit.start()
        try:
            self.process.stdin.close()
            for line in self.process.stdout:
                name, value, unit = json.loads(line)
                found[name] = value
                print(f"{self.model:16}{self.variant:8}{name:26}{value:12.3f} {unit}", flush=True)
                if name == ROWS[-1].name:
                    break
        finally:
            limit.cancel()
            self.end()
        return found

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and its children, and wait for its end."""
        if self.process.returncode is None:
            self.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def start(model: Path, variant: str, options: argparse.Namespace) -> Engine:
    """A process that imports vLLM and waits."""
    environment = {name: value for name, value in os.environ.items() if name != DISABLE}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if variant == ALONE:
        environment[DISABLE] = "1"
    command = [sys.executable, "-m", "benchmarks.plugin_speed", "--engine", str(model)]
    command += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    path = options.log and options.log / f"{model.name}.{variant}.log"
    with open(path, "w") if path else contextlib.nullcontext() as log:
        process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    return Engine(model.name, variant, process)


def measure(model: Path, utilization: float, results: Any) -> None:
    """Start vLLM and write a line for each row."""
    import numpy as np
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        str(model),
        load_format="dummy",
        max_model_len=8192,
        gpu_memory_utilization=utilization,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    rng = np.random.default_rng(0)

    def generate(requests: int, tokens_in: int, tokens_out: int) -> float:
        ids = rng.integers(1, vocabulary, (requests, tokens_in)).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=tokens_out, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": each} for each in ids], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        counts = {len(output.outputs[0].token_ids) for output in outputs}
        if counts != {tokens_out}:
            raise RuntimeError(f"expected {tokens_out} tokens of each request, got {sorted(counts)}")
        return seconds

    def write(name: str, value: float, unit: str) -> None:
        results.write(json.dumps([name, value, unit]) + "\n")
        results.flush()

    write("start", time.perf_counter() - began, "s")
    for row in ROWS:
        write(row.name, row.value(generate), row.unit)


def compare(found: dict[tuple[str, str], dict[str, float]], models: Sequence[Path]) -> list[str]:
    """A line for each row that both variants of a model have: how many times as fast the plugin is."""
    lines = []
    for model in models:
        alone, plugin = (found.get((model.name, variant), {}) for variant in (ALONE, PLUGIN))
        for row in ROWS:
            if row.name in alone and row.name in plugin:
                ratio = plugin[row.name] / alone[row.name]
                faster = ratio if row.higher_is_better else 1 / ratio
                lines.append(f"{model.name:16}{row.name:26}{faster:6.2f}x of vLLM alone")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.plugin_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", type=Path, help="directories with a config.json")
    parser.add_argument("--variants", nargs="+", choices=[ALONE, PLUGIN], default=[ALONE, PLUGIN])
    parser.add_argument("--seconds", type=positive, default=3600, help="limit of all engines together")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="vLLM's, of each engine")
    parser.add_argument("--log", type=Path, metavar="DIRECTORY", help="put vLLM's log of each engine there")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        _run_engine(options)
        return
    if not options.models:
        parser.error("name a model's directory")
    until = time.monotonic() + options.seconds
    engines = [start(model, variant, options) for model in options.models for variant in options.variants]
    found = {}
    try:
        for number, engine in enumerate(engines):
            share = (until - time.monotonic()) / (len(engines) - number)
            found[engine.model, engine.variant] = engine.figures(share)
    finally:
        for engine in engines:
            engine.end()
    print("\n".join(compare(found, options.models)))


def _run_engine(options: argparse.Namespace) -> None:
    # Whatever vLLM prints belongs to its log.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm  # noqa: F401

    sys.stdin.read()
    measure(options.engine, options.gpu_memory_utilization, results)


if __name__ == "__main__":
    main()
