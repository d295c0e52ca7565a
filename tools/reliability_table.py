"""The table of docs/operate/reliability.md: each requirement, what proves it, and the last figure.

Figures are those of `python -m atom.benchmarks.chaos --output docs/operate/reliability.json`; results of
tests are those of `python -m tools.reliability_tests`.
"""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from atom.benchmarks.chaos.report import Report

__all__ = [
    "FIGURES",
    "REQUIREMENTS",
    "RESULTS",
    "Requirement",
    "Result",
    "reliability_table",
    "results",
]

FIGURES = Path("docs/operate/reliability.json")
RESULTS = Path("docs/operate/reliability-tests.json")
_RESTARTS = "tests/e2e/test_restarts.py"
_SHUTDOWN = "tests/e2e/test_shutdown.py"
_EDGES = "tests/e2e/test_edges.py"
_EVERY_TOKEN = "tests/e2e/test_kills_at_every_token.py"
_HOSTILE = "tests/e2e/test_hostile.py"
_WIRE = "tests/unit/frontend/test_app_wire.py"


class Result(msgspec.Struct, frozen=True):
    """What came of a file of tests, or of one."""

    passed: int
    failed: int
    skipped: int
    date: str


class Requirement(NamedTuple):
    """`tests`: files, or tests in them, or programs in tests/evaluation with their flags."""

    name: str
    promise: str
    tests: tuple[str, ...]


REQUIREMENTS = (
    Requirement(
        "R1",
        "a worker dies: every stream goes on, with the same tokens",
        (
            f"{_RESTARTS}::test_an_engine_that_dies_is_restarted",
            f"{_RESTARTS}::test_requests_of_every_kind_go_on",
            _EVERY_TOKEN,
        ),
    ),
    Requirement(
        "R2", "an engine core dies: the same", (f"{_RESTARTS}::test_an_engine_that_dies_is_restarted",)
    ),
    Requirement(
        "R3",
        "a process hangs: it is noticed, its stacks are kept, and streams go on",
        ("tests/e2e/test_hung_processes.py",),
    ),
    Requirement(
        "R4",
        "a frontend dies: streams that asked for it are resumed at another one, orphans end in time",
        (
            "tests/e2e/test_resumption.py",
            _EVERY_TOKEN,
            "tests/unit/engine_core/requests/test_resumable.py",
            "tests/unit/frontend/engine_client/test_resumption.py",
            "tests/unit/frontend/engine_client/test_stream_files.py",
            "tests/unit/frontend/http/test_other_sockets.py",
        ),
    ),
    Requirement(
        "R5",
        "one of several engines dies: the others serve, and no request fails",
        (
            f"{_RESTARTS}::test_of_two_engines_the_other_serves_on",
            "tests/unit/frontend/test_app_data_parallel.py::test_the_server_is_ready_while_one_rank_lives",
        ),
    ),
    Requirement("R6", "a host is cut off: it is declared dead in time", ("tests/nodes/test_cut_links.py",)),
    Requirement(
        "R7",
        "repeated ends: delays, then an exit with the cause; a request that ends engines fails alone",
        (
            f"{_RESTARTS}::test_with_two_frontends_a_request_that_ends_engines_fails_alone",
            f"{_SHUTDOWN}::test_without_restarts_a_dead_process_ends_the_server",
            "tests/unit/atom/supervisor/test_supervisor.py"
            "::test_the_last_line_has_the_first_cause_of_failures_in_a_row",
            "tests/unit/frontend/engine_client/test_replay.py",
        ),
    ),
    Requirement(
        "R8",
        "`/health` and `/ready` tell what is alive and what can generate",
        (
            "tests/e2e/test_health.py",
            "tests/unit/frontend/test_app.py::test_not_ready_before_the_core_is",
            f"{_RESTARTS}::test_an_engine_that_dies_is_restarted",
        ),
    ),
    Requirement(
        "R9",
        "the launcher is killed: nothing is left",
        (f"{_SHUTDOWN}::test_sigkill_of_the_launcher_leaves_nothing",),
    ),
    Requirement(
        "R10",
        "twenty restarts after SIGKILL on the same port",
        (f"{_SHUTDOWN}::test_twenty_starts_after_sigkill_on_the_same_port",),
    ),
    Requirement(
        "R11",
        "a client that leaves ends its work alone",
        (
            f"{_EDGES}::test_disconnecting_while_running",
            f"{_EDGES}::test_disconnecting_in_the_queue_and_in_prefill",
            f"{_EDGES}::test_a_thousand_disconnects_leak_nothing",
        ),
    ),
    Requirement(
        "R12",
        "clients that do not read cost little memory, and no other stream",
        (
            f"{_WIRE}::test_stalled_clients_cost_little_and_are_disconnected_alone",
            "tests/unit/frontend/engine_client/test_output_memory.py",
            "tests/evaluation/stalled_readers.py",
        ),
    ),
    Requirement(
        "R13",
        "a full queue, or one that is too slow: 429 with `Retry-After`",
        (
            "tests/unit/frontend/test_app_edges.py::test_a_full_server_reads_no_bodies",
            "tests/unit/frontend/engine_client/test_admission.py",
            "tests/unit/engine_core/requests/test_queue_limit.py",
        ),
    ),
    Requirement(
        "R14", "nothing is computed after a deadline", ("tests/unit/frontend/test_app_deadlines.py",)
    ),
    Requirement("R15", "ten times the capacity", (f"{_EDGES}::test_ten_times_the_capacity",)),
    Requirement(
        "R16",
        "too long for the context: 400 with both numbers",
        ("tests/unit/engine_core/test_core.py::test_a_request_that_can_never_run_is_refused_alone",),
    ),
    Requirement(
        "R17",
        "malformed requests: 4xx with an error object",
        (f"{_HOSTILE}::test_ten_thousand_hostile_bodies", f"{_WIRE}::test_malformed_bodies_are_a_400"),
    ),
    Requirement(
        "R18", "fields out of range are refused at the edge", (f"{_HOSTILE}::test_the_worst_bodies",)
    ),
    Requirement(
        "R19",
        "each field is honoured or refused by its name",
        ("tests/unit/frontend/api/schemas/test_fields.py",),
    ),
    Requirement(
        "R20",
        "a grammar that takes too long is refused, and delays nobody",
        ("tests/unit/frontend/test_app_deadlines.py::test_a_grammar_that_is_being_compiled",),
    ),
    Requirement(
        "R21",
        "SIGTERM drains, a second one ends at once; an upgrade and a restart of the engines fail no request",
        (
            "tests/e2e/test_upgrades.py",
            "tests/evaluation/upgrades.py --upgrades 4 --rate 20",
            f"{_SHUTDOWN}::test_draining_lets_requests_finish",
            f"{_SHUTDOWN}::test_the_first_signal_drains_and_the_second_ends",
        ),
    ),
    Requirement(
        "R22", "a wrong setting is one line before weights are loaded", ("tests/e2e/test_start_errors.py",)
    ),
    Requirement(
        "R23",
        "servers that start together are all ready",
        (f"{_SHUTDOWN}::test_three_starts_at_once_are_three_servers",),
    ),
    Requirement(
        "R24",
        "the start shows its progress, and what it waits for",
        (
            "tests/unit/atom/supervisor/test_progress.py",
            "tests/unit/atom/supervisor/test_supervisor.py::test_a_long_start_says_what_it_waits_for",
        ),
    ),
    Requirement("R25", "broken files are named", ("tests/e2e/test_start_errors.py::test_cut_off_weights",)),
    Requirement("R26", "a clock that jumps changes nothing", ("tests/arch/test_clocks.py",)),
    Requirement(
        "R27",
        "mixed load for long leaves memory, files and threads as they were",
        ("tests/evaluation/soak.py --minutes 30 --kill-every 60",),
    ),
    Requirement("R28", "no message can carry code", ("tests/arch/test_wire_rules.py",)),
    Requirement("R29", "strangers on internal ports change nothing", ("tests/nodes/test_hostile_ports.py",)),
    Requirement(
        "R30",
        "every route needs the API key, but for probes and the page's files",
        ("tests/unit/frontend/test_app_edges.py::test_every_route_requires_a_key",),
    ),
    Requirement(
        "R31", "templates of requests are refused", ("tests/unit/frontend/api/schemas/test_fields.py",)
    ),
    Requirement(
        "R32",
        "API keys share no cached prompts",
        ("tests/unit/frontend/test_app_edges.py::test_callers_of_different_keys_share_no_cached_prompts",),
    ),
    Requirement(
        "R33",
        "no URL of a request is fetched, unless `--allowed-media-domains` lists its host",
        ("tests/unit/frontend/api/chat/test_messages.py",),
    ),
    Requirement(
        "R34",
        "administration is not on the public port",
        ("tests/e2e/test_admin.py::test_web_pages_and_the_public_port_have_no_administration",),
    ),
)


def reliability_table() -> str:
    """One row for each requirement."""
    found = msgspec.json.decode(FIGURES.read_bytes(), type=list[Report])
    kept = results()
    rows = ["| | promise | tests | last figure |", "|---|---|---|---|"]
    for each in REQUIREMENTS:
        tests = "<br>".join(map(_link, each.tests))
        figures = [_figure(report) for report in found if report.requirement == each.name]
        figures.append(_tests_text([kept.get(test) for test in each.tests]))
        rows.append(f"| {each.name} | {each.promise} | {tests} | {'<br>'.join(figures)} |")
    return "\n".join(rows)


def results() -> dict[str, Result]:
    """By test, as in Requirement."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=dict[str, Result]) if RESULTS.exists() else {}


def _tests_text(found: list[Result | None]) -> str:
    run = [each for each in found if each is not None]
    parts = []
    for name in ("passed", "failed", "skipped"):
        if count := sum(getattr(each, name) for each in run):
            unit = "" if parts else "test " if count == 1 else "tests "
            parts.append(f"{count} {unit}{name}")
    parts += [max(each.date for each in run)] if run else []
    parts += [f"{missing} not run"] if (missing := found.count(None)) else []
    return ", ".join(parts)


def _link(test: str) -> str:
    test, _, flags = test.partition(" ")
    path, _, name = test.partition("::")
    shown = re.sub(r"^test_", "", name or Path(path).stem).replace("_", " ")
    return f"[{shown}](../../{path})" + (f" `{flags}`" if flags else "")


def _figure(report: Report) -> str:
    if (figures := report.overload) is not None:
        return (
            f"{report.scenario}: {figures.goodput:.0f} requests/s served, {figures.peak:.0f} without it; "
            f"{figures.wasted_tokens} of {figures.tokens} tokens wasted; "
            f"served again after {figures.recovery_s:.1f} s; memory "
            f"{report.grown_bytes / 2**20:+.0f} MiB in its second half"
        )
    parts = [f"{report.scenario}: {report.streams - report.failed} of {report.streams} streams complete"]
    parts.append(f"{report.differing} with other tokens")
    if report.median_pause_s is not None:
        parts.append(f"a pause of {report.median_pause_s:.1f} s, at most {report.longest_pause_s:.1f} s")
    parts += [f"{count} x {outcome}" for outcome, count in sorted(report.outcomes.items())]
    return ", ".join(parts)
