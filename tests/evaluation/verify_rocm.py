"""What holds on this AMD GPU? One report, to be sent back.

    python -m tests.evaluation.verify_rocm                  on an MI300 or MI350, an hour or two
    python -m tests.evaluation.verify_rocm --device cpu     the same code without a GPU: some minutes

1. The environment: versions, GPUs, links, AITER, MORI.
2. Ops: every kernel of Triton and AITER against its torch function.
3. Models: tiny ones of each family against transformers, SmolLM2's texts, graphs, whole engines.
4. Benchmarks of ops and of the engine, with AITER and without.

A part that fails, crashes or hangs costs only itself. The report is written anew after each one; the
exit status is 1 if a part failed.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.helpers.checkpoints.smollm2 import gguf_path
from tests.helpers.verification import Outcome, Part, report, run_part

_MINUTE = 60.0
_GPU_TESTS = (
    *("ops", "small_kernels", "attention", "fp8", "aiter", "latent", "sparse", "linear", "sampling"),
    *("experts", "quantized", "quantized_linear", "quantized_experts", "delta_net", "tiny_models", "smollm2"),
    *("wide_models", "batch_invariance", "step_graphs", "graph_modes", "second_stream", "fusion_switches"),
    *("speculation", "tuning", "engine", "several_gpus", "kv_tiers", "images"),
)
_CONFIGS = "atom/benchmarks/models"
_MODELS = ("Qwen3-8B", "Qwen3-30B-A3B", "Qwen3-30B-A3B-FP8", "DeepSeek-V2-Lite", "gpt-oss-20b-MXFP4")
_CPU_TESTS = {
    "ops": ("tests/unit/atom_ops/ops/test_ops.py", "-k", "rms_norm"),
    "AITER's calls, on a model of it in torch": (
        "tests/unit/atom_ops/aiter_impl/test_aiter_impl.py", "-k", "rms_norm or llama",
    ),
    "SmolLM2": ("tests/e2e/test_smollm2.py", "-k", "cold_and_warm"),
}  # fmt: skip


@dataclass
class Options:
    """What to run, and where."""

    device: str
    output: Path
    only: tuple[str, ...] = ()
    """Parts whose names contain one of these words; none: all."""
    work: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="verify-")))
    """For the output of each part."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="an AMD GPU is cuda to torch"
    )
    parser.add_argument("--output", type=Path, default=Path("verify-rocm.md"), help="the report")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="parts with one of these words")
    args = parser.parse_args()
    options = Options(args.device, args.output, tuple(args.only))
    sys.exit(0 if verify(parts(options), options) else 1)


def verify(chosen: Sequence[Part], options: Options) -> bool:
    """Run the parts, one after another, and write the report; whether all passed."""
    outcomes: list[Outcome] = []
    begun = datetime.now(UTC)
    for number, part in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {part.name}: at most {part.deadline_s / 60:.0f} min", flush=True)
        outcomes.append(run_part(part, options.work / str(number)))
        print(f"    {outcomes[-1].summary()}", flush=True)
        options.output.write_text(report(outcomes, options.device, begun, len(chosen)), encoding="utf-8")
    print(f"report: {options.output.resolve()}")
    return all(outcome.passed for outcome in outcomes)


def parts(options: Options) -> list[Part]:
    """Those that the options choose; raises SystemExit if there is none."""
    found = [
        part
        for part in (_environment(), *_tests(options.device), *_benchmarks(options))
        if not options.only or any(word in part.name for word in options.only)
    ]
    return found or sys.exit(f"no part has a name with {' or '.join(options.only)}")


def _environment() -> Part:
    return Part("environment", ("-m", "atom", "doctor", "--json"), 5 * _MINUTE)


def _tests(device: str) -> Iterator[Part]:
    on_gpu = {name: (f"tests/gpu/test_{name}.py", "-m", "gpu") for name in _GPU_TESTS}
    for name, arguments in (_CPU_TESTS if device == "cpu" else on_gpu).items():
        yield _pytest(f"tests: {name}", *arguments)


def _pytest(name: str, *chosen: str) -> Part:
    """In a worker process of pytest-xdist: a GPU fault ends that process, and the next test gets another."""
    isolated = ("-n", "1", "--max-worker-restart=100", "-p", "no:cacheprovider")
    return Part(name, ("-m", "pytest", "-q", *chosen, *isolated, "--junitxml={tests}"), 30 * _MINUTE)


def _benchmarks(options: Options) -> Iterator[Part]:
    """Benchmarks of every provider of each op, and of engines and decode steps with AITER and without it."""
    on_cpu = options.device == "cpu"
    kernels = ["-m", "benchmarks.kernels", "--device", options.device]
    kernels += ["--ops", "rms_norm", "--shapes", "decode-1", "--seconds", "0.01"] if on_cpu else []
    yield Part("benchmark: ops", tuple(kernels), 30 * _MINUTE)
    few = ("--input-len", "128", "--output-len", "8", "--num-prompts", "4")
    many = ("--input-len", "128", "--output-len", "256", "--num-prompts", "512")
    engine = ("-m", "benchmarks.throughput", "--model", gguf_path(), "--device", options.device)
    yield from _twice("benchmark: SmolLM2", (*engine, *(few if on_cpu else many)), options)
    for model in () if on_cpu else _MODELS:
        step = ("-m", "benchmarks.decode_step", "--load-dummy", "--model", f"{_CONFIGS}/{model}")
        yield from _twice(f"benchmark: decode step of {model}", (*step, "--kernels"), options)


def _twice(name: str, arguments: tuple[str, ...], options: Options) -> Iterator[Part]:
    yield Part(name, arguments, 15 * _MINUTE)
    path = os.pathsep.join([str(_without_aiter(options.work)), os.environ.get("PYTHONPATH", "")])
    yield Part(f"{name}, without AITER", arguments, 15 * _MINUTE, {"PYTHONPATH": path})


def _without_aiter(work: Path) -> Path:
    """A directory whose module `aiter` hides the installed one: its import fails, and so it is not used."""
    directory = work / "without-aiter"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "aiter.py").write_text('raise ImportError("hidden for a benchmark without AITER")\n')
    return directory


if __name__ == "__main__":
    main()
