"""The process that compiles grammars, from its parent's side."""

import contextlib
import socket
import threading
from collections.abc import Iterator

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.messages.grammar import CompiledGrammar, GrammarCompilerLaunch, GrammarSource
from atom.shared.utils.fork_server import ForkServer

__all__ = ["MAX_PARALLEL", "BusyError", "Compilation", "CompileError", "GrammarProcess"]

CPU_S = 10
"""CPU time for one grammar, in each thread that compiles it."""
DEADLINE_S = 120
"""Wall time for one grammar. Compiling gives way to other processes, which leave a tenth of a busy core."""
MAX_PARALLEL = 2
_START_DEADLINE_S = 120.0
_MODULE = "workers.grammar.compile_process"


class _CancelledError(Exception):
    """No request needs the compilation."""


class CompileError(Exception):
    """The compile process has failed, or cannot be started."""


class BusyError(CompileError):
    """The machine was too busy to compile a source, which may be a good one."""


class Compilation:
    """One call of `GrammarProcess.compile`, which another thread can cancel."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Kill it, also if it begins later; its result has no meaning then. Safe in any thread."""
        with self._lock:
            self.is_cancelled = True
            if self._connection is not None:
                # The kernel tells the fork, which ends, and this end reads nothing more.
                self._connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def using(self, connection: socket.socket) -> Iterator[None]:
        """A block that uses the connection to its fork. Raises _CancelledError before or after it."""
        with self._lock:
            if self.is_cancelled:
                raise _CancelledError
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None
        if self.is_cancelled:
            raise _CancelledError


class GrammarProcess:
    """Starts the process with the first grammar, and again after it has died. Safe to use in any thread."""

    def __init__(self, checkpoint: Checkpoint):
        self._decoder: Decoder[CompiledGrammar] = Decoder(CompiledGrammar)
        self._forks = ForkServer(
            _MODULE, lambda fd: GrammarCompilerLaunch(checkpoint, fd, CPU_S, MAX_PARALLEL, DEADLINE_S)
        )

    def compile(
        self, source: GrammarSource, compilation: Compilation | None = None
    ) -> tuple[CompiledGrammar, bool]:
        """(the grammar, or why the source cannot be used; whether the answer is final).

        Waits for it; of `MAX_PARALLEL` threads at a time. Not final is that its forks were killed, or that it
        was cancelled. Raises CompileError; BusyError where it may succeed later.
        """
        using = (compilation or Compilation()).using
        timeout_s = _START_DEADLINE_S + 2 * DEADLINE_S
        try:
            answer, took_s = self._forks.ask(encode(source), timeout_s, CPU_S, using)
        except _CancelledError:
            return CompiledGrammar(error="the request was dropped"), False
        except TimeoutError:
            raise CompileError("the grammar compiler did not answer in time") from None
        except OSError as error:
            raise CompileError(f"the grammar compiler has ended: {error}") from None
        if not answer:
            return _killed(took_s), False
        try:
            return self._decoder.decode(answer), True
        except WireError as error:
            raise CompileError(f"the grammar compiler sent an {error}") from None

    def close(self) -> None:
        """End the process; a compilation ends without an answer."""
        self._forks.close()


def _killed(took_s: float) -> CompiledGrammar:
    """Why a fork has ended without an answer, after so many seconds. Raises BusyError.

    Another time may do: the system may have lacked memory.
    """
    if took_s >= DEADLINE_S:
        raise BusyError(f"it was not compiled within {DEADLINE_S} s, as the machine is busy: try again later")
    if took_s >= CPU_S:
        return CompiledGrammar(
            error=f"it takes more than {CPU_S} s of CPU time, or too much memory, to compile: simplify it"
        )
    return CompiledGrammar(error="it takes too much memory to compile: simplify it")
