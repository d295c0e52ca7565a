"""`python -m workers.grammar.matcher_process`: follows outputs by their grammars, started by a worker.

Each grammar has a fork (`workers.forks`), which shares memory with the worker: a mask for each slot.

    fork <- StartMatcher, -> MatcherStarted when the source is compiled, then
         <- FollowOutputs, -> MasksReady when the slots' masks are written
         <- ForgetOutput

The kernel ends a fork that needs more CPU time for a message than it may: to accept a token, and to find
those that may follow, can take a grammar hours. The worker then sees the socket close, and nothing else
has noticed.
"""

import math
import mmap
import os
import select
import signal
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.grammar import (
    FollowOutputs,
    ForgetOutput,
    GrammarMatcherLaunch,
    GrammarSource,
    MasksReady,
    MatcherStarted,
    StartMatcher,
)
from atom.shared.utils.errors import one_line
from atom.shared.utils.logger import setup_logging
from atom.shared.utils.process import read_launch
from workers.forks import ForkLimits, serve_forks
from workers.grammar.compiling import MAX_COMPILE_MEMORY, compile_source, make_compiler
from workers.grammar.frame_socket import read_frame, write_frame
from workers.grammar.output_matcher import OutputMatcher, Words, fill_masks
from workers.grammar.vocabulary import tokenizer_info

if TYPE_CHECKING:
    import xgrammar

# Before numpy and torch start pools of threads, which a fork would not have.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

MAX_CPU_S = 0.5
"""CPU time of a fork for the ids of a step, besides `_ID_S` for each."""
MAX_MEMORY = MAX_COMPILE_MEMORY + (512 << 20)
"""Bytes of a fork, besides those it shares: to compile, and for what the outputs so far need."""
_ID_S = 5e-5
_PIECE = 256  # ids of a resumed output, about a millisecond
_MAX_FORKS = 1024
_NICE = 10  # compiling gives way to the steps of the engine


def main() -> None:
    """Serve until the worker closes the control socket."""
    launch = read_launch(GrammarMatcherLaunch)
    setup_logging("grammar matchers")
    control = socket.socket(fileno=launch.control_fd)
    serve_forks(control, tokenizer_info(launch.checkpoint), ForkLimits(MAX_MEMORY, _MAX_FORKS), _serve)


def _serve(connection: socket.socket, descriptors: list[int], info: "xgrammar.TokenizerInfo") -> None:
    """Follow outputs until the worker closes the socket."""
    start = Decoder[StartMatcher](StartMatcher).decode(read_frame(connection))
    shape = start.num_slots, start.masks_per_slot, start.num_words
    memory = mmap.mmap(descriptors[0], 4 * math.prod(shape))
    words_SJW: Words = np.frombuffer(memory, np.int32).reshape(shape)
    try:
        compiled = _compiled(start.source, info)
    except Exception as error:  # of any kind: only the requests with this grammar fail
        reason = f"the grammar could not be loaded: {one_line(error, Exception)}"
        write_frame(connection, encode(MatcherStarted(reason)))
        return
    write_frame(connection, encode(MatcherStarted(pid=os.getpid())))
    _Follower(connection, compiled, words_SJW).run()


class _Follower:
    """The outputs of a grammar.

    A resumed output has many ids at once. They are accepted in pieces, and others do not wait for them.
    """

    def __init__(self, connection: socket.socket, compiled: "xgrammar.CompiledGrammar", words_SJW: Words):
        import xgrammar

        self._connection = connection
        self._compiled = compiled
        self._words_SJW = words_SJW
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)
        self._matchers: dict[int, OutputMatcher] = {}
        self._resumed: dict[int, tuple[int, list[int]]] = {}
        """By slot, the message that resumed it and its ids that are left."""

    def run(self) -> None:
        """Returns when the worker has closed the socket."""
        decoder: Decoder[FollowOutputs | ForgetOutput] = Decoder(FollowOutputs | ForgetOutput)
        while True:
            if self._resumed and not select.select([self._connection], [], [], 0)[0]:
                self._resume()
                continue
            frame = read_frame(self._connection)
            if not frame:
                return
            message = decoder.decode(frame)
            if isinstance(message, FollowOutputs):
                self._follow(message)
            else:
                self._matchers.pop(message.slot, None)
                self._resumed.pop(message.slot, None)

    def _follow(self, message: FollowOutputs) -> None:
        ready = []
        drafts = {output.slot: output.drafts for output in message.outputs if output.drafts}
        _allow_cpu_time(len(message.outputs) + sum(map(len, drafts.values())))
        for output in message.outputs:
            if output.begin is not None:
                self._matchers[output.slot] = OutputMatcher(self._compiled, output.begin)
                self._resumed.pop(output.slot, None)
            _, left = self._resumed.get(output.slot, (0, []))
            if left or len(output.ids) > _PIECE:
                self._resumed[output.slot] = message.serial, left + output.ids
                continue
            self._matchers[output.slot].accept(output.ids)
            ready.append(output.slot)
        self._send_masks(message.serial, ready, drafts)

    def _resume(self) -> None:
        """Accept the next piece of an output."""
        slot, (serial, ids) = next(iter(self._resumed.items()))
        _allow_cpu_time(_PIECE)
        self._matchers[slot].accept(ids[:_PIECE])
        if len(ids) > _PIECE:
            self._resumed[slot] = serial, ids[_PIECE:]
        else:
            del self._resumed[slot]
            self._send_masks(serial, [slot])

    def _send_masks(
        self, serial: int, slots: list[int], drafts: Mapping[int, list[int]] | None = None
    ) -> None:
        matchers = {slot: self._matchers[slot] for slot in slots}
        fill_masks(matchers, self._words_SJW, self._batch)
        for slot in matchers.keys() & (drafts or {}).keys():
            matchers[slot].fill_draft_masks((drafts or {})[slot], self._words_SJW[slot])
        signal.setitimer(signal.ITIMER_PROF, 0)
        failures = {slot: matcher.failure for slot, matcher in matchers.items() if matcher.failure}
        write_frame(self._connection, encode(MasksReady(serial, slots, failures)))


def _allow_cpu_time(num_ids: int) -> None:
    """Let the kernel end the process if it needs more from now on, until the timer is set to 0."""
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S + _ID_S * num_ids)


def _compiled(encoded: bytes, info: "xgrammar.TokenizerInfo") -> "xgrammar.CompiledGrammar":
    """Compile in a thread that gives way: a thread has a priority of its own, which it cannot raise again."""

    def compile_nicely() -> "xgrammar.CompiledGrammar":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        source = Decoder[GrammarSource](GrammarSource).decode(encoded)
        return compile_source(source, make_compiler(info))[0]

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compile_nicely).result()


if __name__ == "__main__":
    main()
