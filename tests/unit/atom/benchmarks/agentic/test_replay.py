"""Turns follow each other with what was said before; forks begin where their parents were."""

import asyncio
from typing import Any

import pytest

from atom.benchmarks.agentic.contexts import Tokens
from atom.benchmarks.agentic.replay import Replay, Target, TurnResult
from atom.benchmarks.agentic.sessions import Session, Turn
from atom.benchmarks.backend_request_func import RequestFuncInput, RequestFuncOutput
from atom.benchmarks.serving.datasets import TextSource

TARGET = Target("http://server", "model", is_chat=False, ignore_eos=True)


class Server:
    """Replies with as many tokens as it is asked for, unless a session is to fail at a turn."""

    def __init__(self, fails: dict[str, int] | None = None):
        self.requests: list[RequestFuncInput] = []
        self.running = 0
        self.most_running = 0
        self._fails = fails or {}

    async def send(self, request: RequestFuncInput) -> RequestFuncOutput:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        assert request.headers is not None
        seen = sum(other.headers == request.headers for other in self.requests)
        if self._fails.get(request.headers["X-Session-ID"]) == seen:
            return RequestFuncOutput(error="refused")
        return RequestFuncOutput(success=True, output_tokens=request.output_len, ttft=0.001, latency=0.002)


def run(
    sessions: list[Session], server: Server, most: int | None = None, duration: float | None = None
) -> list[TurnResult]:
    async def main() -> list[TurnResult]:
        replay = Replay(sessions, TARGET, Tokens(TextSource(None, 100), 0), most)
        results, _ = await asyncio.wait_for(replay.run(server.send, duration, False), 30)
        return results

    return asyncio.run(main())


def turns(count: int) -> list[Turn]:
    return [Turn(4, 3) for _ in range(count)]


def test_each_prompt_begins_with_the_last_one_and_its_reply() -> None:
    server = Server()
    results = run([Session("a", turns(3), 10)], server)
    prompts: list[Any] = [request.prompt for request in server.requests]
    assert [len(prompt) for prompt in prompts] == [14, 21, 28]
    assert prompts[1][:14] == prompts[0] and prompts[2][:21] == prompts[1]
    assert [result.known_tokens for result in results] == [10, 17, 24]
    assert [request.prompt_len for request in server.requests] == [14, 21, 28]


def test_sessions_begin_with_the_same_tokens() -> None:
    server = Server()
    run([Session("a", turns(1), 10), Session("b", turns(1), 10), Session("c", turns(1), 5)], server)
    prompts: list[Any] = [request.prompt for request in server.requests]
    assert prompts[0][:10] == prompts[1][:10] and prompts[0][10:] != prompts[1][10:]
    assert prompts[2][:5] != prompts[0][:5]


def test_a_fork_begins_after_its_parent_s_turns() -> None:
    server = Server()
    forks = [Session("f", turns(1), 10, "a", 2), Session("g", turns(1), 10, "a", 0)]
    results = run([Session("a", turns(3), 10), *forks], server)
    assert len(results) == 5
    prompts: dict[int, list[Any]] = {}
    for request in server.requests:
        prompts.setdefault(len(request.prompt), []).append(request.prompt)
    assert {length: len(found) for length, found in prompts.items()} == {14: 2, 21: 1, 28: 2}
    assert prompts[28][0][:24] == prompts[28][1][:24] != prompts[28][0][4:28]
    assert {request.headers["X-Session-ID"] for request in server.requests if request.headers} == {"a"}


def test_a_failed_turn_ends_its_session_and_the_forks_that_begin_later() -> None:
    server = Server(fails={"a": 2})
    forks = [Session("f", turns(1), 10, "a", 2)]
    results = run([Session("a", turns(3), 10), Session("b", turns(2), 10), *forks], server)
    assert sorted((result.session, result.turn, result.output.success) for result in results) == [
        ("a", 0, True),
        ("a", 1, False),
        ("b", 0, True),
        ("b", 1, True),
    ]


@pytest.mark.parametrize("most", [1, 2, None])
def test_the_number_of_sessions_is_bounded(most: int | None) -> None:
    server = Server()
    run([Session(str(number), turns(2), 1) for number in range(5)], server, most)
    assert server.most_running == (most or 5)


def test_no_turn_begins_after_the_duration() -> None:
    server = Server()
    # A pause that ends after it is not waited for.
    slow = [Session("a", [Turn(4, 3), Turn(4, 3, pause_s=3600)], 1), Session("f", turns(1), 1, "a", 2)]
    slow.append(Session("late", turns(1), 1, start_s=3600))
    assert len(run(slow, server, duration=0.5)) == 1
