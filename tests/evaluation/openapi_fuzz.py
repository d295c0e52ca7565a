"""Schemathesis against a small server, over the server's own OpenAPI document.

    python -m tests.evaluation.openapi_fuzz --schemathesis .venv-fuzzing/bin/schemathesis --examples 200

Exit status 1 for a response of 5xx, one that does not fit the document, a traceback in the log, an engine
that has stopped working, or a frontend that grows.
"""

import argparse
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import psutil

from tests.helpers.servers.edges import Gauges
from tests.helpers.servers.random_server import ARGS, write_checkpoint
from tests.helpers.servers.server import Server, running_server

_CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
_ENDLESS = "/status/events"
_LIMITS = ("--max-model-len", "512", "--default-max-tokens", "8")
_MAX_GROWTH = 32 << 20
_DEADLINE_S = 3600


def main() -> int:
    parser = argparse.ArgumentParser(description="Schemathesis against a small server.")
    parser.add_argument("--schemathesis", required=True, help="path of the program")
    parser.add_argument("--examples", type=int, default=200, help="for each route and phase")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory) / "model")
        with running_server("--model", str(model), *ARGS, *_LIMITS) as server:
            found = problems(server, Path(args.schemathesis).absolute(), args.examples, directory)
    for problem in found:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if found else 0


def problems(server: Server, program: Path, examples: int, directory: str) -> list[str]:
    """What is wrong after the run; `directory` is for the program's own files."""
    frontend = psutil.Process(next(pid for pid, line in server.children().items() if "frontend.main" in line))
    before, steps = frontend.memory_info().rss, Gauges(server)["engine_steps_total"]
    command = [str(program), "run", f"{server.url}/openapi.json", "--url", server.url, "--checks", _CHECKS]
    command += ["--phases", "coverage,fuzzing", "-n", str(examples), "--exclude-path", _ENDLESS]
    command.append("--continue-on-failure")
    status = subprocess.run(command, cwd=directory, timeout=_DEADLINE_S).returncode
    size, made = frontend.memory_info().rss, Gauges(server)["engine_steps_total"] - steps
    grown = size - before
    print(f"{made:.0f} engine steps; the frontend has {size >> 20} MiB, {grown >> 20} more than before")
    steps_before = Gauges(server)["engine_steps_total"]
    body = b'{"prompt": "one two", "max_tokens": 8, "ignore_eos": true}'
    with urllib.request.urlopen(f"{server.url}/v1/completions", body, timeout=60) as response:
        served = response.status == 200
    works = served and Gauges(server)["engine_steps_total"] >= steps_before + 8
    return [
        text
        for text, holds in (
            ("schemathesis reports failures", status != 0),
            ("a traceback in the log", "Traceback" in server.text()),
            ("the engine does not work any more", not works),
            (f"the frontend has grown by {grown} bytes", grown > _MAX_GROWTH),
        )
        if holds
    ]


if __name__ == "__main__":
    sys.exit(main())
