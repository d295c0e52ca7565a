"""`python -m workers.grammar.compile_process`: compiles grammars, started by a frontend or the library.

Each source is compiled in a fork of this process, which has loaded xgrammar and the vocabulary. So a source
can crash, hang or exhaust nothing but its fork: the kernel ends it by its limits on time and memory.

    parent -> control socket: the end of a new socket, for each source
    fork   <- that socket: GrammarSource,  -> CompiledGrammar; closed without one if the fork was ended
    parent -> that socket: closed before the answer, if no request needs the grammar any more: ends the fork

xgrammar imports torch and transformers, which take seconds: the first source waits for that.
"""

import array
import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.grammar import GrammarCompilerLaunch, GrammarSource
from atom.shared.utils.logger import setup_logging
from atom.shared.utils.process import read_launch
from workers.grammar.compiling import compiled
from workers.grammar.vocabulary import tokenizer_info

if TYPE_CHECKING:
    import xgrammar

# Before numpy and torch start pools of threads, which a fork would not have.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

_MAX_MEMORY = 1 << 30  # that a fork may allocate
_NICE = 10  # compiling gives way to the steps of the engine
_MAX_THREADS = 8


def main() -> None:
    """Serve until the parent closes the control socket."""
    launch = read_launch(GrammarCompilerLaunch)
    setup_logging("grammar compiler")
    control = socket.socket(fileno=launch.control_fd)
    os.nice(_NICE)

    import xgrammar

    info = tokenizer_info(launch.checkpoint)
    threads = min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))
    compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
    running: set[int] = set()
    while (connection := _next_connection(control)) is not None:
        _reap(running, launch.max_parallel)
        if (pid := os.fork()) == 0:
            _serve_and_exit(connection, compiler, launch.timeout_s)
        running.add(pid)
        connection.close()


def _next_connection(control: socket.socket) -> socket.socket | None:
    """The next socket that the parent passes; None at the end."""
    size = array.array("i").itemsize
    data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(size))
    if not data:
        return None
    (descriptor,) = array.array("i", ancillary[0][2][:size])
    return socket.socket(fileno=descriptor)


def _reap(running: set[int], most: int) -> None:
    """Forget forks that have ended; wait until fewer than `most` run."""
    for pid in list(running):
        if os.waitpid(pid, os.WNOHANG)[0]:
            running.discard(pid)
    while len(running) >= most:
        running.discard(os.wait()[0])


def _serve_and_exit(connection: socket.socket, compiler: "xgrammar.GrammarCompiler", timeout_s: int) -> None:
    """Compile one source in this fork, and end it."""
    status = 1
    try:
        signal.alarm(timeout_s)  # ends the process, whatever it executes
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + _MAX_MEMORY,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with connection.makefile("rwb") as stream:
            source = Decoder[GrammarSource](GrammarSource).decode(stream.read())
            with _ended_by_its_peer(connection):
                found = compiled(source, compiler)
            stream.write(encode(found))
        status = 0
    finally:
        os._exit(status)


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


def _data_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))


if __name__ == "__main__":
    main()
