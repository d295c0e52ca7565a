"""Compiled grammars of a frontend: a bounded cache, and the requests that wait for one."""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from atom.shared.messages.grammar import CompiledGrammar
from frontend.errors import OverloadedError, RequestError, UnavailableError
from frontend.text.compile_queue import CompileJob, CompileQueue
from frontend.text.constraint import Constraint
from frontend.text.grammar_process import MAX_PARALLEL, BusyError, CompileError, GrammarProcess
from frontend.text.live_grammars import LiveGrammars

__all__ = ["GrammarCompiler"]

_RETRY_AFTER_S = 60
_MAX_CACHED = 256
_MAX_CACHED_BYTES = 64 * 1024 * 1024
_MAX_LIVE_BYTES = 512 * 1024 * 1024


class GrammarCompiler:
    """Compiles the grammars of requests; the event loop and the steps of the engine never wait for it."""

    def __init__(self, process: GrammarProcess):
        self._process = process
        self._threads = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="grammars")
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._cached_bytes = 0
        self._queue = CompileQueue()
        self._running: set[asyncio.Task[None]] = set()
        self.live = LiveGrammars(_MAX_LIVE_BYTES)

    async def compile(self, constraint: Constraint, tenant: str = "") -> CompiledGrammar:
        """The compiled grammar for a request of `tenant`; tenants take turns.

        When it is cancelled, and no other request waits for the same source, the compilation is killed.
        Raises RequestError for a source that cannot be compiled, OverloadedError, UnavailableError.
        """
        compiled = self._cache.get(constraint.key)
        if compiled is None:
            compiled = await self._wait(constraint, tenant)
        else:
            self._cache.move_to_end(constraint.key)
        if compiled.error:
            raise RequestError(f"'{constraint.field}': {compiled.error}", param=constraint.field)
        return compiled

    def close(self) -> None:
        """End the compile process."""
        self._process.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, constraint: Constraint, tenant: str) -> CompiledGrammar:
        """The result of the one compilation that all requests with the same source wait for."""
        job = self._queue.join(constraint, tenant)
        self._start_due()
        try:
            return await asyncio.shield(job.result)
        except BusyError as error:
            raise OverloadedError(f"'{constraint.field}': {error}", _RETRY_AFTER_S) from None
        except CompileError as error:
            raise UnavailableError(str(error)) from None
        finally:
            self._queue.leave(job, tenant)

    def _start_due(self) -> None:
        while len(self._running) < MAX_PARALLEL and (job := self._queue.next()) is not None:
            running = asyncio.create_task(self._compile(job))
            self._running.add(running)
            running.add_done_callback(self._ended)

    def _ended(self, running: "asyncio.Task[None]") -> None:
        self._running.discard(running)
        self._start_due()

    async def _compile(self, job: CompileJob) -> None:
        """Set the result of a job."""
        source = job.constraint.source
        try:
            compiled, is_final = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._process.compile, source, job.compilation
            )
        except Exception as error:
            if job.waiting:
                job.result.set_exception(error)
            return
        finally:
            self._queue.done(job)
        if not job.compilation.is_cancelled:
            if is_final:
                self._keep(job.constraint.key, compiled)
            job.result.set_result(compiled)

    def _keep(self, key: bytes, compiled: CompiledGrammar) -> None:
        self._cache[key] = compiled
        self._cached_bytes += len(compiled.source)
        while len(self._cache) > _MAX_CACHED or self._cached_bytes > _MAX_CACHED_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest.source)
