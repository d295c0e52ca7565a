"""The compile process, with real forks: a compilation that is cancelled ends its fork and no other."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.shared.messages.grammar import CompiledGrammar, GrammarSource
from frontend.text.grammar_process import Compilation, GrammarProcess
from tests.helpers import tiny_tokenizer

DEADLINE_S = 60.0
QUICK = GrammarSource("regex", "(yes|no)")
LONG = GrammarSource(
    "json_schema",
    json.dumps(
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}
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


def test_a_cancelled_compilation_ends_its_fork(process: GrammarProcess) -> None:
    compiled, is_final = process.compile(QUICK)
    assert compiled.compiled and is_final
    compilation = Compilation()
    results: list[tuple[CompiledGrammar, bool]] = []
    thread = threading.Thread(target=lambda: results.append(process.compile(LONG, compilation)))
    thread.start()
    deadline = time.monotonic() + DEADLINE_S
    while not forks_of(process):
        assert time.monotonic() < deadline and thread.is_alive()
        time.sleep(0.005)
    compilation.cancel()
    thread.join(DEADLINE_S)
    assert [(each.error, is_final) for each, is_final in results] == [("the request was dropped", False)]
    while forks_of(process):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert process.compile(QUICK)[0].compiled == compiled.compiled
    assert process.compile(QUICK, compilation)[0].error == "the request was dropped"
