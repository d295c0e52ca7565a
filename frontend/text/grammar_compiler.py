"""Compiled grammars of a frontend: a bounded cache, and the requests that wait for one."""

import asyncio
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from atom.shared.messages.grammar import CompiledGrammar, Grammar, RowGrammar
from frontend.errors import OverloadedError, RequestError, UnavailableError
from frontend.text.constraint import Constraint
from frontend.text.grammar_process import MAX_PARALLEL, CompileError, GrammarProcess

__all__ = ["GrammarCompiler"]

_MAX_CACHED = 256
_MAX_CACHED_BYTES = 64 * 1024 * 1024
_MAX_WAITING = 64
_MAX_LIVE_BYTES = 512 * 1024 * 1024
_RETRY_AFTER_S = 5


class GrammarCompiler:
    """Compiles the grammars of requests; the event loop and the steps of the engine never wait for it."""

    def __init__(self, process: GrammarProcess):
        self._process = process
        self._threads = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="grammars")
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._cached_bytes = 0
        self._compiling: dict[bytes, asyncio.Task[CompiledGrammar]] = {}
        self._live: dict[bytes, int] = {}  # requests that hold a grammar, by its key
        self._live_bytes = 0
        self._live_lock = threading.Lock()

    async def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises RequestError for a source that cannot be compiled, OverloadedError, UnavailableError."""
        compiled = self._cache.get(constraint.key)
        if compiled is None:
            compiled = await self._wait(constraint)
        else:
            self._cache.move_to_end(constraint.key)
        if compiled.error:
            raise RequestError(f"'{constraint.field}': {compiled.error}", param=constraint.field)
        return compiled

    def grammar(self, row: RowGrammar, compiled: CompiledGrammar) -> Grammar:
        """The grammar of a request, which may be held until the request ends. Raises OverloadedError."""
        key = row.key
        size = len(compiled.compiled)
        with self._live_lock:
            if key not in self._live and self._live_bytes + size > _MAX_LIVE_BYTES:
                raise OverloadedError(
                    f"the grammars of running requests take {self._live_bytes} bytes; try again later",
                    _RETRY_AFTER_S,
                )
            self._live_bytes += 0 if key in self._live else size
            self._live[key] = self._live.get(key, 0) + 1
        grammar = Grammar(row, compiled.compiled, compiled.memory)
        weakref.finalize(grammar, self._release, key, size).atexit = False
        return grammar

    def close(self) -> None:
        """End the compile process."""
        self._process.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, constraint: Constraint) -> CompiledGrammar:
        """The result of the one compilation that all requests with the same source wait for."""
        task = self._compiling.get(constraint.key)
        if task is None:
            if len(self._compiling) >= _MAX_WAITING:
                raise OverloadedError(
                    f"{len(self._compiling)} grammars are waiting to be compiled; try again later",
                    _RETRY_AFTER_S,
                )
            task = asyncio.create_task(self._compile(constraint))
            self._compiling[constraint.key] = task
        try:
            return await asyncio.shield(task)
        except CompileError as error:
            raise UnavailableError(str(error)) from None

    async def _compile(self, constraint: Constraint) -> CompiledGrammar:
        loop = asyncio.get_running_loop()
        key = constraint.key
        try:
            compiled, is_final = await loop.run_in_executor(
                self._threads, self._process.compile, constraint.source
            )
        finally:
            del self._compiling[key]
        if is_final:
            self._cache[key] = compiled
            self._cached_bytes += len(compiled.compiled)
            while len(self._cache) > _MAX_CACHED or self._cached_bytes > _MAX_CACHED_BYTES:
                _, oldest = self._cache.popitem(last=False)
                self._cached_bytes -= len(oldest.compiled)
        return compiled

    def _release(self, key: bytes, size: int) -> None:
        with self._live_lock:
            self._live[key] -= 1
            if not self._live[key]:
                del self._live[key]
                self._live_bytes -= size
