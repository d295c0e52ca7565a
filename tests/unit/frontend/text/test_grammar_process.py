"""The compile process, with real forks: a compilation that is cancelled ends its fork and no other."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.shared.messages.grammar import CompiledGrammar, GrammarSource
from atom.shared.utils import fork_server
from frontend.text import grammar_process
from frontend.text.grammar_process import DEADLINE_S, BusyError, Compilation, CompileError, GrammarProcess
from tests.helpers.checkpoints import tiny_tokenizer

RUN_S = 60.0
QUICK = GrammarSource("regex", "(yes|no)")
OTHER = GrammarSource("regex", "(one|two)")
LONG = GrammarSource(
    "json_schema",
    json.dumps(
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(6000)}}
    ),
)
"""Takes seconds."""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[GrammarProcess]:
    made = GrammarProcess(tiny_tokenizer.checkpoint(tmp_path))
    yield made
    made.close()


def forks_of(process: GrammarProcess) -> list[int]:
    pid = process._forks.pid
    assert pid is not None
    found = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [int(each) for each in found[0] if "Z" not in _state(int(each))]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_a_source_is_judged_by_its_cpu_time(process: GrammarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork that gets no core for two seconds, here as its source comes late, goes on."""

    def late(*given: Any) -> bytes:
        time.sleep(2)
        return exchange(*given)

    exchange = fork_server.exchange
    monkeypatch.setattr(grammar_process, "CPU_S", 1)
    monkeypatch.setattr(fork_server, "exchange", late)
    assert process.compile(QUICK)[0].source
    assert "too much memory" in grammar_process._killed(0.5).error
    assert "more than 1 s of CPU time" in grammar_process._killed(1.5).error
    with pytest.raises(BusyError, match="the machine is busy: try again"):
        grammar_process._killed(DEADLINE_S + 1.0)


def test_a_cancelled_compilation_ends_its_fork(process: GrammarProcess) -> None:
    compiled, is_final = process.compile(QUICK)
    assert compiled.source and is_final
    compilation = Compilation()
    results: list[tuple[CompiledGrammar, bool]] = []
    thread = threading.Thread(target=lambda: results.append(process.compile(LONG, compilation)))
    thread.start()
    until(lambda: bool(forks_of(process)))
    assert thread.is_alive()
    compilation.cancel()
    thread.join(RUN_S)
    assert [(each.error, is_final) for each, is_final in results] == [("the request was dropped", False)]
    until(lambda: not forks_of(process))
    assert process.compile(QUICK)[0].source == compiled.source
    assert process.compile(QUICK, compilation)[0].error == "the request was dropped"


def killing(process: GrammarProcess, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Kill the forks of the next so many tries before they have a source; returns those killed so far."""
    killed: list[int] = []

    def exchanged(*given: Any) -> bytes:
        if len(killed) < times:
            until(lambda: bool(forks_of(process)))
            killed.extend(forks_of(process))
            os.kill(killed[-1], signal.SIGKILL)
            until(lambda: not forks_of(process))
        return exchange(*given)

    assert process.compile(QUICK)[0].source  # it has started
    until(lambda: not forks_of(process))
    exchange = fork_server.exchange
    monkeypatch.setattr(fork_server, "exchange", exchanged)
    return killed


def test_a_fork_that_was_killed_is_replaced(process: GrammarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source need not be the cause: the system may have lacked memory."""
    killed = killing(process, monkeypatch, 1)
    found, is_final = process.compile(OTHER)
    assert len(killed) == 1
    assert found.source and not found.error and is_final


def test_a_source_whose_forks_are_killed_is_not_judged_for_good(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = killing(process, monkeypatch, 2)
    found, is_final = process.compile(OTHER)
    assert len(killed) == 2
    assert "too much memory" in found.error and not is_final
    assert process.compile(OTHER)[0].source


def test_a_fork_that_was_ended_by_its_limit_is_not_replaced(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = killing(process, monkeypatch, 2)
    monkeypatch.setattr(grammar_process, "CPU_S", 0)
    assert "CPU time" in process.compile(OTHER)[0].error
    assert len(killed) == 1


def test_the_next_source_does_not_notice_that_the_process_was_killed(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another compilation may have started the next process already."""

    def kill_process(*given: Any) -> bytes:
        monkeypatch.undo()
        pid = process._forks.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        answer = exchange(*given)
        until(lambda: process._forks.pid is None)
        assert process.compile(QUICK)[0].source
        return answer

    exchange = fork_server.exchange
    monkeypatch.setattr(fork_server, "exchange", kill_process)
    with pytest.raises(CompileError, match="has ended: try again"):
        process.compile(QUICK)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RUN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
