"""The command line: which server, which scenarios; the exit status is 1 where a stream noticed."""

import argparse
import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec

from atom.benchmarks import chaos
from atom.benchmarks.chaos.processes import ChaosError, supervisor_of
from atom.benchmarks.chaos.report import Report
from atom.benchmarks.chaos.run import Target, run_scenario, run_undisturbed
from atom.benchmarks.chaos.scenarios import SCENARIOS
from atom.shared.utils.open_files import raise_open_files_limit

_START_DEADLINE_S = 600.0
_STOP_DEADLINE_S = 60.0


def main(arguments: list[str] | None = None) -> None:
    """Exit status 0: all scenarios passed; 1: one has failed; 2: one could not be run."""
    args = _parser().parse_args(arguments)
    raise_open_files_limit()
    try:
        with _server(args) as (url, supervisor):
            reports = asyncio.run(_run(args, url, supervisor))
    except (ChaosError, aiohttp.ClientError, OSError) as error:
        print(f"atom.benchmarks.chaos: {error}", file=sys.stderr)
        sys.exit(2)
    if args.output:
        args.output.write_bytes(msgspec.json.format(msgspec.json.encode(reports)) + b"\n")
    sys.exit(1 if any(report.problems for report in reports) else 0)


def _parser() -> argparse.ArgumentParser:
    scenarios = "\n".join(
        f"  {name:10} {each.requirement:4} {each.summary}" for name, each in SCENARIOS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.chaos",
        description=f"{chaos.__doc__}\nscenarios:\n{scenarios}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("url", nargs="?", help="a server on this host; needs --admin-socket")
    parser.add_argument("--admin-socket", help="that of the server at `url`: it tells its processes")
    parser.add_argument("--scenario", nargs="+", required=True, choices=[*SCENARIOS, "all"])
    parser.add_argument("--streams", type=int, default=50, help="at a time")
    parser.add_argument("--requests", type=int, default=1, help="streams of each client, one after another")
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--seconds", type=float, default=60.0, help="of an overload")
    parser.add_argument("--seed", type=int, default=0, help="chooses the processes that are hit")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--output", type=Path, help="a JSON file for the reports")
    parser.add_argument("--launch", nargs=argparse.REMAINDER, help="start a server with these flags")
    return parser


async def _run(args: argparse.Namespace, url: str, supervisor: int) -> list[Report]:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with aiohttp.ClientSession(url, headers=headers) as session, session.get("/v1/models") as response:
        response.raise_for_status()
        model = (await response.json())["data"][0]["id"]
    target = Target(
        url,
        supervisor,
        headers,
        model,
        clients=args.streams,
        tokens=args.tokens,
        seed=args.seed,
        seconds=args.seconds,
        requests=args.requests,
    )
    names = list(SCENARIOS) if "all" in args.scenario else args.scenario
    compares = not all(SCENARIOS[name].is_overload for name in names)
    undisturbed = await run_undisturbed(target) if compares else []
    reports = []
    for name in names:
        reports.append(await run_scenario(target, name, SCENARIOS[name], undisturbed))
        print(reports[-1].text(), flush=True)
    return reports


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(URL, process id of the supervisor) of the server that is given, or of one that is started."""
    if (args.url is None) == (args.launch is None):
        raise ChaosError("give the URL of a server, or --launch with the flags of one")
    if args.launch is None:
        if not args.admin_socket:
            raise ChaosError("a URL needs --admin-socket, so that the server's processes can be found")
        yield args.url.rstrip("/"), supervisor_of(args.admin_socket)
        return
    command = [sys.executable, "-m", "atom.entrypoints.openai_server", *args.launch]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield _url_of(process), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _url_of(process: "subprocess.Popen[str]") -> str:
    """The URL in the server's log, which is shown. Raises ChaosError if it does not start."""
    found: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if match := re.search(r"ready .*(https?://\S+)", line):
                found.append(match[1])
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    if not ready.wait(_START_DEADLINE_S) or not found:
        raise ChaosError("the server did not start: see its log above")
    return found[0]


if __name__ == "__main__":
    main()
