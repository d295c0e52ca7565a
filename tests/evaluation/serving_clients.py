"""What our serving benchmark can drive, and whether another client reports the same.

    python -m tests.evaluation.serving_clients ceiling
    python -m tests.evaluation.serving_clients agree --vllm path/to/vllm --model DIR [--base-url URL]
    python -m tests.evaluation.serving_clients agree --vllm path/to/vllm --model DIR --steady

`ceiling` has a server whose tokens come by the clock feed many streams at a rising rate: the client
keeps up as long as it reports the clock's time per token. `agree` lets our client and
`vllm bench serve` measure by turns, a server of ours or else that clock, and prints medians. With
`--steady` that is a server of a tiny model whose steps take a fixed time: on a machine whose pace
changes from minute to minute no two runs of one client agree.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import uvloop

from atom.benchmarks.backend_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput
from atom.benchmarks.serving.load import Load, open_session, run_load
from atom.benchmarks.serving.metrics import calculate_metrics
from atom.shared.utils.open_files import raise_open_files_limit
from tests.helpers.servers.random_server import write_checkpoint
from tests.helpers.servers.server import running_server
from tests.helpers.servers.token_clock import running_clock

_TTFT_MS, _ITL_MS = 500.0, 50.0
_PROMPT_MS, _STEP_MS = 100.0, 20.0
_TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_GAPS_MS = (400, 200, 100, 80, 60, 50, 40, 30)
_SECONDS = 8
_METRICS = ("ttft", "tpot", "itl", "e2el")
_DEADLINE_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    ceiling_parser = commands.add_parser("ceiling")
    ceiling_parser.add_argument("--streams", type=int, default=2000)
    ceiling_parser.set_defaults(run=ceiling)
    agree_parser = commands.add_parser("agree")
    agree_parser.add_argument("--vllm", required=True, help="the vllm command")
    agree_parser.add_argument("--model", required=True, help="directory with the tokenizer, and served name")
    agree_parser.add_argument("--steady", action="store_true", help="a server of ours, of fixed steps")
    agree_parser.add_argument("--base-url", help="a server of that model; a clock when absent")
    agree_parser.add_argument("--rounds", type=int, default=5)
    agree_parser.add_argument("--num-prompts", type=int, default=40)
    agree_parser.add_argument("--max-concurrency", type=int, default=4)
    agree_parser.add_argument("--input-len", type=int, default=32)
    agree_parser.add_argument("--output-len", type=int, default=32)
    agree_parser.set_defaults(run=agree)
    args = parser.parse_args()
    args.run(args)


def ceiling(args: argparse.Namespace) -> None:
    """A line for each rate, until the client is late by more than a tenth."""
    raise_open_files_limit()
    print("streams  tokens/s by the clock  TPOT ms  reported  CPU us/token  CPU us/request")
    idle = uvloop.run(_drive(args.streams, 1, 1000))[1] / args.streams * 1e6
    for gap in _GAPS_MS:
        tokens = _SECONDS * 1000 // gap
        reported, cpu = uvloop.run(_drive(args.streams, tokens, gap))
        each = (cpu * 1e6 / args.streams - idle) / (tokens - 1)
        rate = args.streams * 1000 // gap
        print(
            f"{args.streams:>7}  {rate:>21}  {gap:>7}  {reported:>8.2f}  {each:>12.1f}  {idle:>14.0f}",
            flush=True,
        )
        if reported > 1.1 * gap:
            break


async def _drive(streams: int, tokens: int, gap_ms: float) -> tuple[float, float]:
    """Median TPOT in milliseconds, and the seconds of CPU that the client took."""
    with running_clock(2000, gap_ms) as url:
        request = RequestFuncInput("hello", f"{url}/v1/completions", 1, tokens, "clock")
        async with open_session(None) as session:
            begun = time.process_time()
            outputs, seconds = await run_load(
                lambda one: ASYNC_REQUEST_FUNCS["vllm"](one, session), [request] * streams, Load(), False
            )
            cpu = time.process_time() - begun
    metrics = calculate_metrics(outputs, seconds, [], {})
    assert metrics.total_output == streams * tokens, f"{streams - metrics.completed} requests failed"
    return metrics.distributions["tpot"].median, cpu


def agree(args: argparse.Namespace) -> None:
    """The medians of both clients, metric by metric."""
    if args.steady:
        with _steady_server(Path(args.model)) as (args.model, url):
            _compare(args, url)
        return
    if args.base_url:
        _compare(args, args.base_url)
        return
    with running_clock(_TTFT_MS, _ITL_MS) as url:
        print(f"clock: first token after {_TTFT_MS:g} ms, then one every {_ITL_MS:g} ms")
        _compare(args, url)


@contextlib.contextmanager
def _steady_server(model: Path) -> Iterator[tuple[str, str]]:
    """The directory of a tiny model with that one's tokenizer, which is also its served name; the URL."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        write_checkpoint(Path(folder), vocab_size=vocabulary, **_TINY)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model / name, folder)
        pace = {
            "STEADY_STEP_MS": f"{_STEP_MS}",
            "STEADY_PROMPT_MS": f"{_PROMPT_MS}",
            "PYTHONPATH": str(Path(__file__).with_name("steady")),
        }
        served = ("--model", folder, "--served-model-name", folder, "--load-dummy", "--device", "cpu")
        with patch.dict(os.environ, pace), running_server(*served) as server:
            print(f"a server whose steps take {_STEP_MS:g} ms, with prompts {_PROMPT_MS:g} ms")
            yield folder, server.url


def _compare(args: argparse.Namespace, url: str) -> None:
    clients = {
        "ours": [sys.executable, "-m", "atom.benchmarks.benchmark_serving"],
        "vllm": [args.vllm, "bench", "serve"],
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    for turn in range(args.rounds):
        for name, command in clients.items():
            found[name].append(_measure(args, command, url, seed=turn))
            shown = ", ".join(f"{metric} {found[name][-1][f'median_{metric}_ms']:.2f}" for metric in _METRICS)
            print(f"{name}: {shown}", flush=True)
    keys = [f"median_{metric}_ms" for metric in _METRICS] + ["output_throughput"]
    print(f"{'':<20}{'ours':>10}{'vllm':>10}  difference")
    for key in keys:
        ours, theirs = (statistics.median(one[key] for one in found[name]) for name in clients)
        print(f"{key:<20}{ours:>10.2f}{theirs:>10.2f}  {ours / theirs - 1:+.2%}")


def _measure(args: argparse.Namespace, command: list[str], url: str, seed: int) -> dict[str, float]:
    """One run; no two clients send the same prompts, which the second would find in the cache."""
    lengths = ["--random-input-len", args.input_len, "--random-output-len", args.output_len]
    seeds = ["--seed", 2 * seed + (command[0] == args.vllm)]
    amount = ["--num-prompts", args.num_prompts, "--max-concurrency", args.max_concurrency]
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            *("--model", args.model, "--backend", "vllm", "--base-url", url, "--dataset-name", "random"),
            *(*lengths, *seeds, *amount, "--num-warmups", 1, "--ignore-eos", "--disable-tqdm"),
            *("--percentile-metrics", ",".join(_METRICS), "--save-result"),
            *("--result-dir", folder, "--result-filename", "result.json"),
        ]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        subprocess.run(
            [*command, *map(str, flags)],
            check=True,
            capture_output=True,
            env=environment,
            timeout=_DEADLINE_S,
        )
        result: dict[str, float] = json.loads((Path(folder) / "result.json").read_text())
    return result


if __name__ == "__main__":
    main()
