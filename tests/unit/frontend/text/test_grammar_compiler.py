"""Requests wait for the grammars that they need, and for no others' longer than their turn."""

import asyncio
import threading

import pytest

from atom.shared.messages.grammar import CompiledGrammar, GrammarSource
from frontend.errors import OverloadedError, UnavailableError
from frontend.text.constraint import Constraint
from frontend.text.grammar_compiler import GrammarCompiler
from frontend.text.grammar_process import BusyError, Compilation, CompileError

DEADLINE_S = 60.0


class FakeProcess:
    """Compiles a source when it is released; one called `slow` only when it is cancelled."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []

    def compile(self, source: GrammarSource, compilation: Compilation) -> tuple[CompiledGrammar, bool]:
        self.begun.append(source.text)
        if source.text == "crash":
            raise CompileError("the grammar compiler has ended")
        if source.text == "busy":
            raise BusyError("try again later")
        for _ in range(int(DEADLINE_S / 0.005)):
            if compilation.is_cancelled or not source.text.startswith("slow"):
                break
            threading.Event().wait(0.005)
        self.ended.append(source.text)
        return CompiledGrammar(source.text.encode(), 1), True

    def close(self) -> None:
        """As that of GrammarProcess."""


def source(name: str) -> Constraint:
    return Constraint(GrammarSource("regex", name), "guided_regex")


async def until_begun(process: FakeProcess, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(process.begun) < count:
            await asyncio.sleep(0.002)


def compiler_of(process: FakeProcess) -> GrammarCompiler:
    return GrammarCompiler(process)  # type: ignore[arg-type]


def test_dropped_requests_leave_nothing_to_compile() -> None:
    """Those of 100 that were dropped neither run on nor count for later ones."""
    process = FakeProcess()
    compiler = compiler_of(process)

    async def run() -> None:
        for start in (0, 50):
            dropped = [
                asyncio.create_task(compiler.compile(source(f"slow{number}"), "a"))
                for number in range(start, start + 50)
            ]
            await until_begun(process, 2)
            for task in dropped:
                task.cancel()
            await asyncio.gather(*dropped, return_exceptions=True)
        async with asyncio.timeout(DEADLINE_S):
            assert (await compiler.compile(source("quick"), "a")).source == b"quick"
        assert len(process.begun) < 10
        assert len(compiler._queue) == 0

    asyncio.run(run())
    compiler.close()


def test_one_waiting_request_keeps_a_compilation() -> None:
    process = FakeProcess()
    compiler = compiler_of(process)

    async def run() -> None:
        first = asyncio.create_task(compiler.compile(source("slow"), "a"))
        second = asyncio.create_task(compiler.compile(source("slow"), "b"))
        await until_begun(process, 1)
        first.cancel()
        await asyncio.sleep(0.02)
        assert process.ended == [] and not second.done()
        second.cancel()
        async with asyncio.timeout(DEADLINE_S):
            while not process.ended:
                await asyncio.sleep(0.002)
        assert not compiler._cache

    asyncio.run(run())
    compiler.close()


def test_a_tenant_waits_for_no_more_than_the_turn_of_another() -> None:
    """Two slow ones of one tenant are killed: the next is the other tenant's, not the third slow one."""
    process = FakeProcess()
    compiler = compiler_of(process)

    async def run() -> None:
        many = [asyncio.create_task(compiler.compile(source(f"slow{i}"), "a")) for i in range(20)]
        await until_begun(process, 2)
        one = asyncio.create_task(compiler.compile(source("honest"), "b"))
        await asyncio.sleep(0)
        for task in many[:2]:
            task.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await one
        assert "honest" in process.begun[2:4]
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)

    asyncio.run(run())
    compiler.close()


def test_a_crash_concerns_all_that_wait_and_no_later_request() -> None:
    process = FakeProcess()
    compiler = compiler_of(process)

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="has ended"):
                await compiler.compile(source("crash"))
        assert (await compiler.compile(source("quick"))).source == b"quick"
        assert (await compiler.compile(source("quick"))).source == b"quick"
        assert process.begun == ["crash", "crash", "quick"]

    asyncio.run(run())
    compiler.close()


def test_a_busy_machine_is_no_fault_of_the_source() -> None:
    compiler = compiler_of(FakeProcess())
    with pytest.raises(OverloadedError, match="'guided_regex': try again later") as caught:
        asyncio.run(compiler.compile(source("busy"), "a"))
    assert caught.value.retry_after_s > 0
    compiler.close()
