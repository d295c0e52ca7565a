"""The library's links to several engines."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from atom.shared.messages.engine import (
    AddRequest,
    CoreReady,
    CoreStats,
    FinishReason,
    GetStats,
    Sampling,
    TokenDeltas,
)
from atom.shared.messages.grammar import Grammar, GrammarBytes, RowGrammar
from frontend.engine_client.core_links import CoreLinks
from frontend.engine_client.dp_router import DPRouter
from tests.helpers.servers.fake_core import FakeCore, Script

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
WAIT_S = 60.0


@contextmanager
def connected(directory: Path, script: Script) -> Iterator[tuple[CoreLinks, DPRouter, list[FakeCore]]]:
    with (
        FakeCore(directory, lambda _: script) as first,
        FakeCore(directory, lambda _: script, rank=1) as second,
    ):
        context, router = zmq.Context(), DPRouter("least_requests", 2, 16)
        links = CoreLinks(context, [first.address, second.address], router, {b"key": b"compiled"}.get)
        links.connect()
        try:
            ready = dict(filter(None, (links.receive(WAIT_S) for _ in range(2))))
            assert sorted(ready) == [0, 1]
            assert all(isinstance(message, CoreReady) for message in ready.values())
            yield links, router, [first, second]
        finally:
            context.destroy(linger=0)


def test_requests_and_tokens_of_two_engines(tmp_path: Path) -> None:
    ended: set[int] = set()
    ranks: Counter[int] = Counter()
    with connected(tmp_path, Script([5, 6, 7], FinishReason.MAX_TOKENS)) as (links, router, cores):
        for number in range(10):
            links.add(AddRequest([2 * number, 2 * number + 1], b"\1\0\0\0", 3, GREEDY))
        while len(ended) < 20:
            rank, message = links.receive(WAIT_S) or (0, None)
            assert isinstance(message, TokenDeltas)
            for finished in message.finished:
                links.end(finished.request_id)
                ended.add(finished.request_id)
                ranks[rank] += 1
        assert ranks == {0: 10, 1: 10} and [len(core.requests) for core in cores] == [10, 10]
        assert router.load(0) == router.load(1) == (0, 0)
        assert links.receive(0.01) is None


def test_aborts_reach_the_right_engine_and_messages_reach_all(tmp_path: Path) -> None:
    with connected(tmp_path, Script([], None)) as (links, _, cores):
        for number in range(4):
            links.add(AddRequest([number], b"\1\0\0\0", 3, GREEDY))
        links.abort([0, 1, 3])
        cores[0].wait_for(lambda: [core.aborted for core in cores] == [[0], [1, 3]])
        links.send_to_all(GetStats())
        answers = dict(filter(None, (links.receive(WAIT_S) for _ in range(2))))
        assert {rank: type(message) for rank, message in answers.items()} == {0: CoreStats, 1: CoreStats}


def test_grammars_are_sent_to_the_engines_that_ask(tmp_path: Path) -> None:
    grammar = Grammar(RowGrammar(b"key", [1]), 1)
    with connected(tmp_path, Script([5], None)) as (links, _, cores):
        for number in range(6):
            links.add(AddRequest([number], b"\1\0\0\0", 3, GREEDY, grammar=grammar))
        deadline = time.monotonic() + WAIT_S
        while not all(core.grammars for core in cores):
            assert time.monotonic() < deadline
            links.receive(0.01)
        assert [core.grammars for core in cores] == [[GrammarBytes(b"key", b"compiled")]] * 2
