"""Tenants take turns at compiling, and what no request waits for is dropped."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from atom.shared.messages.grammar import GrammarSource
from frontend.errors import OverloadedError
from frontend.text import compile_queue
from frontend.text.compile_queue import CompileJob, CompileQueue
from frontend.text.constraint import Constraint


def source(name: str) -> Constraint:
    return Constraint(GrammarSource("regex", name), "guided_regex")


def next_of(queue: CompileQueue) -> str | None:
    job = queue.next()
    return None if job is None else job.constraint.source.text


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    return lambda: asyncio.run(test())  # type: ignore[arg-type]


def joined(queue: CompileQueue, *names: str) -> list[CompileJob]:
    """Requests whose tenant is the first letter of their source."""
    return [queue.join(source(name), name[0]) for name in names]


@in_loop
async def test_tenants_take_turns() -> None:
    queue = CompileQueue()
    joined(queue, "a1", "a2", "a3", "b1", "c1", "b2")
    assert [next_of(queue) for _ in range(7)] == ["a1", "b1", "c1", "a2", "b2", "a3", None]


@in_loop
async def test_a_source_that_another_tenant_waits_for_is_started_in_the_first_of_their_turns() -> None:
    queue = CompileQueue()
    joined(queue, "a1", "a2")
    job = queue.join(source("a2"), "b")
    assert [next_of(queue) for _ in range(3)] == ["a1", "a2", None]
    assert queue.join(source("a2"), "c") is job and queue.next() is None
    queue.done(job)
    assert len(queue) == 1


@in_loop
async def test_what_no_request_waits_for_is_not_compiled() -> None:
    queue = CompileQueue()
    first, second = joined(queue, "a1", "a2")
    queue.join(source("a2"), "b")
    queue.leave(first, "a")
    assert first.compilation.is_cancelled and len(queue) == 1
    queue.leave(second, "a")
    assert not second.compilation.is_cancelled
    assert queue.next() is second and queue.next() is None
    queue.leave(second, "b")
    assert second.compilation.is_cancelled and len(queue) == 0
    assert queue.join(source("a2"), "b") is not second


@in_loop
async def test_bounds_are_for_a_tenant_and_in_all() -> None:
    queue = CompileQueue()
    for number in range(compile_queue._MAX_OF_TENANT):
        queue.join(source(f"a{number}"), "a")
    with pytest.raises(OverloadedError, match="64 grammars of this API key are waiting"):
        queue.join(source("more"), "a")
    queue.leave(queue.join(source("a1"), "a"), "a")  # the same source costs nothing
    jobs = [queue.join(source(f"b{number}"), f"b{number}") for number in range(64)]
    with pytest.raises(OverloadedError, match="128 grammars are waiting"):
        queue.join(source("c"), "c")
    queue.leave(jobs[0], "b0")
    queue.join(source("c"), "c")
