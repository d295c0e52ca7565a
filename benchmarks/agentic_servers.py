"""The load of coding agents on several servers of one machine, which take turns.

    python -m benchmarks.agentic_servers --model PATH --rounds 3 \\
        --server atom "atom-launch {model} --port {port}" \\
        --server vllm "vllm serve {model} --port {port} --enable-prompt-tokens-details" \\
        --server llama.cpp "llama-server -m model.gguf --port {port}" \\
        -- --num-sessions 8 --max-context 4096

In a round each server starts, answers the same sessions and ends; every other round has them in reverse, so
that what changes on the machine meanwhile hits all alike. What comes after `--` are flags of
`atom.benchmarks.agentic`, whose results are kept in --result-dir. A figure is the median of the rounds.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.common.arguments import positive, single_line_errors

_START_S = 600.0
_STOP_S = 30.0
_POLL_S = 0.25
_COLUMNS = {
    "output tok/s": ("serving", "output_throughput"),
    "first turn, ms": ("first_ttft_ms",),
    "later turns, ms": ("later_ttft_ms",),
    "per token, ms": ("serving", "distributions", "tpot", "median"),
    "hit rate": ("hit_rate",),
}
"""Figures of a result file, by its keys."""


@dataclass(frozen=True)
class Contender:
    """A server, and its command line with `{model}` and `{port}`."""

    name: str
    command: str

    def arguments(self, model: str, port: int) -> list[str]:
        """Raises BenchmarkError for a command without a port."""
        if "{port}" not in self.command:
            raise BenchmarkError(
                f"--server {self.name}: its command has no {{port}}, at which it is to listen"
            )
        return [
            part.replace("{model}", model).replace("{port}", str(port)) for part in shlex.split(self.command)
        ]


def main() -> None:
    args = _parser().parse_args()
    contenders = [Contender(*pair) for pair in args.server]
    with single_line_errors():
        found: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contenders}
        for number in range(args.rounds):
            for contender in contenders if number % 2 == 0 else contenders[::-1]:
                print(f"round {number + 1}: {contender.name}", flush=True)
                name = f"{contender.name}-{number + 1}.json"
                found[contender.name].append(run(contender, args, args.result_dir / name))
        print(*table(found), sep="\n")


def run(contender: Contender, args: argparse.Namespace, result: Path) -> dict[str, Any]:
    """Figures of one server, from its start to its end. Raises BenchmarkError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running(contender, args.model, port, result.with_suffix(".log")):
        command = [
            sys.executable,
            "-m",
            "atom.benchmarks.agentic",
            "--model",
            args.model,
            "--port",
            str(port),
        ]
        saving = ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
        try:
            done = subprocess.run([*command, *saving, "--disable-tqdm", *args.flags], timeout=args.deadline)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(
                f"{contender.name}: not done in {args.deadline} s: raise --deadline"
            ) from None
    if done.returncode:
        raise BenchmarkError(f"{contender.name}: atom.benchmarks.agentic failed, see above")
    return dict(json.loads(result.read_text(encoding="utf-8")))


@contextlib.contextmanager
def running(contender: Contender, model: str, port: int, log: Path) -> Iterator[None]:
    """The server, once it answers; its process group is gone when the block ends. Raises BenchmarkError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            contender.arguments(model, port), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_ready(process, port, contender.name, log)
            yield
        finally:
            _end(process)


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Markdown: a row for each server, with the medians of its rounds."""
    lines = [f"| | {' | '.join(_COLUMNS)} |", f"|---|{'---|' * len(_COLUMNS)}"]
    for name, results in found.items():
        cells = [_median([_value(result, keys) for result in results]) for keys in _COLUMNS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _value(result: Any, keys: Sequence[str]) -> float | None:
    for key in keys:
        result = result[key]
    return None if result is None else float(result)


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.4g}" if known else "not told"


def _wait_ready(process: subprocess.Popen[bytes], port: int, name: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not _answers(port):
        if process.poll() is not None:
            raise BenchmarkError(f"{name} ended with status {process.returncode}: see {log}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{name} was not ready in {_START_S:.0f} s: see {log}")
        time.sleep(_POLL_S)


def _answers(port: int) -> bool:
    """Whether the server has its model: /health of llama.cpp is 503 until then."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=_STOP_S) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for what is left of its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_STOP_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agentic_servers", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="Path of the model and its tokenizer.")
    parser.add_argument(
        "--server",
        action="append",
        nargs=2,
        required=True,
        metavar=("NAME", "COMMAND"),
        help="A server; once for each. {model} and {port} are replaced.",
    )
    parser.add_argument("--rounds", type=positive, default=3, help="Runs of each server (3).")
    parser.add_argument("--deadline", type=positive, default=3600, help="Most seconds of one run (3600).")
    parser.add_argument(
        "--result-dir", type=Path, default=Path("agentic-servers"), help="For results and logs."
    )
    parser.add_argument("flags", nargs="*", help="After --: flags of atom.benchmarks.agentic.")
    return parser


if __name__ == "__main__":
    main()
