"""`python -m workers.grammar.compile_process`: compiles grammars, started by a frontend or the library.

Each source is compiled in a fork (`workers.forks`).

    fork   <- GrammarSource,  -> CompiledGrammar; the socket is closed without one if the fork was ended
    parent -> closes the socket before the answer, if no request needs the grammar any more: ends the fork
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.grammar import GrammarCompilerLaunch, GrammarSource
from atom.shared.utils.logger import setup_logging
from atom.shared.utils.process import read_launch
from workers.forks import ForkLimits, serve_forks
from workers.grammar.compiling import MAX_COMPILE_MEMORY, compiled, make_compiler, num_threads
from workers.grammar.vocabulary import tokenizer_info

if TYPE_CHECKING:
    import xgrammar

# Before numpy and torch start pools of threads, which a fork would not have.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

_NICE = 10  # compiling gives way to the steps of the engine


def main() -> None:
    """Serve until the parent closes the control socket."""
    launch = read_launch(GrammarCompilerLaunch)
    setup_logging("grammar compiler")

    def serve(connection: socket.socket, _: list[int], info: "xgrammar.TokenizerInfo") -> None:
        # Both end the process, whatever it executes. A source is judged by its CPU time: other programs, and
        # the engine's own steps, may have the cores.
        os.nice(_NICE)
        signal.setitimer(signal.ITIMER_PROF, launch.cpu_s * num_threads())
        signal.alarm(launch.deadline_s)
        _compile(connection, info)

    limits = ForkLimits(MAX_COMPILE_MEMORY, launch.max_parallel)
    serve_forks(socket.socket(fileno=launch.control_fd), tokenizer_info(launch.checkpoint), limits, serve)


def _compile(connection: socket.socket, info: "xgrammar.TokenizerInfo") -> None:
    """Compile the source that comes over the connection."""
    compiler = make_compiler(info)
    with connection.makefile("rwb") as stream:
        source = Decoder[GrammarSource](GrammarSource).decode(stream.read())
        with _ended_by_its_peer(connection):
            found = compiled(source, compiler)
        stream.write(encode(found))


@contextlib.contextmanager
def _ended_by_its_peer(connection: socket.socket) -> Iterator[None]:
    """A block during which the kernel kills this process if the other end of `connection` is closed."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(connection, 0)
    if poller.poll(0):  # it was closed before
        os.kill(os.getpid(), signal.SIGIO)
    yield
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) & ~os.O_ASYNC)


if __name__ == "__main__":
    main()
