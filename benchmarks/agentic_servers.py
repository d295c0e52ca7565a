"""The load of coding agents on several servers of one machine, which take turns.

    python -m benchmarks.agentic_servers --model PATH --rounds 3 \\
        --server atom "atom-launch {model} --port {port}" \\
        --server vllm "vllm serve {model} --port {port} --enable-prompt-tokens-details" \\
        --server llama.cpp "llama-server -m model.gguf --port {port}" \\
        -- --num-sessions 8 --max-context 4096

In a round each server starts, answers the same sessions and ends; every other round has them in reverse, so
that what changes on the machine meanwhile hits all alike. A server is ready when it has answered a request.
What comes after `--` are flags of `atom.benchmarks.agentic`, whose results are kept in --result-dir. A figure
is the median of the rounds.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.common.arguments import positive, single_line_errors

_ANSWER_S = 30.0
_STOP_S = 30.0
_POLL_S = 0.25
_COLUMNS = {
    "failed": ("sessions", "failed"),
    "output tok/s": ("serving", "output_throughput"),
    "first turn, ms": ("first_ttft_ms",),
    "later turns, ms": ("later_ttft_ms",),
    "per token, ms": ("serving", "distributions", "tpot", "median"),
    "hit rate": ("hit_rate",),
    "known": ("known_rate",),
    "good tok/s": ("good_output_throughput",),
}
"""Figures of a result file, by its keys; of a list the sum."""


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
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the server, too
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
    with running(contender, args.model, port, result.with_suffix(".log"), args.deadline):
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
def running(contender: Contender, model: str, port: int, log: Path, deadline_s: float) -> Iterator[None]:
    """The server, once it answers; its process group is gone when the block ends.

    Raises BenchmarkError for a server that does not answer within `deadline_s`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            contender.arguments(model, port), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            is_ready = partial(_answers, model, port, contender.name)
            _wait_ready(process, is_ready, contender.name, log, deadline_s)
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
        result = sum(each[key] for each in result) if isinstance(result, list) else result[key]
    return None if result is None else float(result)


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.4g}" if known else "not told"


def _wait_ready(
    process: subprocess.Popen[bytes], is_ready: Callable[[], bool], name: str, log: Path, deadline_s: float
) -> None:
    ends_at = time.monotonic() + deadline_s
    while not is_ready():
        if process.poll() is not None:
            raise BenchmarkError(f"{name} ended with status {process.returncode}: see {log}")
        if time.monotonic() > ends_at:
            raise BenchmarkError(f"{name} did not answer in {deadline_s} s: raise --deadline, or see {log}")
        time.sleep(_POLL_S)


def _answers(model: str, port: int, name: str) -> bool:
    """Whether the server answers a request: while it loads, it refuses connections or says 503.

    Raises BenchmarkError for a server that refuses the request itself.
    """
    body = {"model": model, "prompt": [1], "max_tokens": 1}  # no text: a model may have no tokenizer
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S):
            return True
    except urllib.error.HTTPError as error:
        if error.code < 500:
            reason = error.read().decode(errors="replace")
            raise BenchmarkError(f"{name} refused a request, {error.code}: {reason}") from None
    except OSError:  # also urllib's own
        pass
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
    parser.add_argument(
        "--deadline", type=positive, default=3600, help="Most seconds of a start, and of a run (3600)."
    )
    parser.add_argument(
        "--result-dir", type=Path, default=Path("agentic-servers"), help="For results and logs."
    )
    parser.add_argument("flags", nargs="*", help="After --: flags of atom.benchmarks.agentic.")
    return parser


if __name__ == "__main__":
    main()
