"""Measures a server under the load of coding agents.

    python -m atom.benchmarks.agentic --model PATH --num-sessions 32 --goodput ttft:2000 tpot:50

    flags ─▶ sessions (drawn, or of a trace) ─▶ replay: one task per session ─▶ figures ─▶ table, JSON file

`--sweep 4 8 16` does one run per number of concurrent sessions, then writes a table and a plot of throughput
against tokens/s per user.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from atom.benchmarks.agentic.cache_hits import read_cache_hits
from atom.benchmarks.agentic.contexts import Tokens
from atom.benchmarks.agentic.flags import check, make_parser, session_model
from atom.benchmarks.agentic.replay import Replay, Target
from atom.benchmarks.agentic.report import AgenticMetrics, measure, report_lines, write_report
from atom.benchmarks.agentic.sessions import Session, make_sessions
from atom.benchmarks.agentic.trace import read_trace, write_trace
from atom.benchmarks.backend_request_func import ASYNC_REQUEST_FUNCS
from atom.benchmarks.serving.datasets import TextSource
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.load import open_session
from atom.benchmarks.serving.report import failures
from atom.benchmarks.serving.run import count_tokens, run_checked, server_url, text_source
from atom.benchmarks.serving.sweep import Point, check_plotting, table, write_sweep

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if the benchmark cannot run or every request failed."""
    args = make_parser().parse_args(argv)
    return run_checked(args, check, _sweep if args.sweep else _single)


async def _single(args: argparse.Namespace) -> int:
    metrics = await _run(args, _sessions(args), text_source(args))
    return 0 if metrics.serving.completed else 1


async def _sweep(args: argparse.Namespace) -> int:
    """Every run has sessions and a shared text of its own, so that none hits the cache of an earlier run."""
    check_plotting()
    source = text_source(args)
    points = []
    for concurrency in sorted(set(args.sweep)):
        changes = {"max_concurrency": concurrency, "seed": args.seed + concurrency}
        if args.result_prefix:
            changes["result_filename"] = f"{args.result_prefix}-concurrency{concurrency}.json"
        run = argparse.Namespace(**vars(args) | changes)
        metrics = await _run(run, _sessions(run), source)
        if not metrics.serving.completed:
            return 1
        points.append(Point.of(concurrency, metrics.serving))
    print(*table(points), sep="\n")
    named = argparse.Namespace(**vars(args) | {"request_rate": args.session_rate})
    for path in write_sweep(named, points, datetime.now().strftime("%Y%m%d-%H%M%S"), args.num_gpus):
        print(f"Written: {path}")
    return 0


def _sessions(args: argparse.Namespace) -> list[Session]:
    if args.trace is not None:
        return read_trace(args.trace)
    try:
        sessions = make_sessions(session_model(args), args.num_sessions, args.seed)
    except ValueError as error:
        raise BenchmarkError(f"--max-context: {error}") from None
    if args.save_trace is not None:
        write_trace(args.save_trace, sessions)
        print(f"Written: {args.save_trace}")
    return sessions


async def _run(args: argparse.Namespace, sessions: Sequence[Session], source: TextSource) -> AgenticMetrics:
    """One run, printed and saved."""
    target = Target(
        api_url=server_url(args) + args.endpoint,
        model=args.served_model_name or args.model,
        is_chat=args.backend == "openai-chat",
        ignore_eos=not args.stop_at_eos,
    )
    turns = sum(len(session.turns) for session in sessions)
    most = "unlimited" if args.max_concurrency is None else str(args.max_concurrency)
    print(f"{len(sessions)} sessions with {turns} turns, concurrency: {most}", flush=True)
    replay = Replay(sessions, target, Tokens(source, args.seed), args.max_concurrency)
    async with open_session(None) as session:
        function = ASYNC_REQUEST_FUNCS[args.backend]
        before = await read_cache_hits(session, server_url(args))
        results, seconds = await replay.run(
            lambda request: function(request, session), args.duration, not args.disable_tqdm
        )
        after = await read_cache_hits(session, server_url(args))
    outputs = [result.output for result in results]
    count_tokens(outputs, source.tokenizer)
    hits = after - before if before is not None and after is not None else None
    metrics = measure(results, seconds, args.metric_percentiles, dict(args.goodput or []), hits)
    print(*report_lines(args, metrics), sep="\n")
    for line in failures(outputs):
        print(line, file=sys.stderr)
    if args.save_result:
        path: Path = write_report(args, metrics, datetime.now())
        print(f"Written: {path}")
    return metrics


if __name__ == "__main__":
    sys.exit(main())
