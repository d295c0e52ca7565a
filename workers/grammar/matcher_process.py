"""`python -m workers.grammar.matcher_process`: follows outputs by their grammars, started by a worker.

Each grammar has a fork (`workers.grammar.forks`), which shares memory with the worker: a mask for each slot.

    fork <- StartMatcher, -> MatcherStarted, then
         <- FollowOutput, -> MaskReady when the slot's mask is written
         <- ForgetOutput

The kernel ends a fork that needs more CPU time for a message than it may: to accept a token, and to find
those that may follow, can take a grammar hours. The worker then sees the socket close, and nothing else
has noticed.
"""

import mmap
import os
import signal
import socket
import zlib
from typing import TYPE_CHECKING

import numpy as np

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.grammar import (
    FollowOutput,
    ForgetOutput,
    GrammarMatcherLaunch,
    MaskReady,
    MatcherStarted,
    StartMatcher,
)
from atom.shared.utils.errors import one_line
from atom.shared.utils.logger import setup_logging
from atom.shared.utils.process import read_launch
from workers.grammar.forks import ForkLimits, serve_forks
from workers.grammar.frame_socket import read_frame, write_frame
from workers.grammar.output_matcher import OutputMatcher, Words

if TYPE_CHECKING:
    import xgrammar

# Before numpy and torch start pools of threads, which a fork would not have.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

MAX_CPU_S = 0.5
"""CPU time of a fork for one message, besides `_ID_S` for each id after the first."""
MAX_MEMORY = 512 << 20
"""Bytes of a fork, besides those it shares: its grammar, and what the outputs so far need."""
_ID_S = 5e-5
_MAX_FORKS = 1024
_MAX_TEXT_BYTES = 128 << 20


def main() -> None:
    """Serve until the worker closes the control socket."""
    launch = read_launch(GrammarMatcherLaunch)
    setup_logging("grammar matchers")
    control = socket.socket(fileno=launch.control_fd)
    serve_forks(control, launch.checkpoint, ForkLimits(MAX_MEMORY, _MAX_FORKS), _serve)


def _serve(connection: socket.socket, descriptors: list[int], info: "xgrammar.TokenizerInfo") -> None:
    """Follow outputs until the worker closes the socket."""
    start = Decoder[StartMatcher](StartMatcher).decode(read_frame(connection))
    shape = start.num_slots, start.num_words
    memory = mmap.mmap(descriptors[0], 4 * shape[0] * shape[1])
    words_SW: Words = np.frombuffer(memory, np.int32).reshape(shape)
    try:
        compiled = _loaded(start.compiled, info)
    except Exception as error:  # of any kind: only the requests with this grammar fail
        reason = f"the grammar could not be loaded: {one_line(error, Exception)}"
        write_frame(connection, encode(MatcherStarted(reason)))
        return
    write_frame(connection, encode(MatcherStarted()))
    matchers: dict[int, OutputMatcher] = {}
    decoder: Decoder[FollowOutput | ForgetOutput] = Decoder(FollowOutput | ForgetOutput)
    while frame := read_frame(connection):
        message = decoder.decode(frame)
        if isinstance(message, ForgetOutput):
            matchers.pop(message.slot, None)
            continue
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S + _ID_S * len(message.ids))  # ends the process
        if message.begin is not None:
            matchers[message.slot] = OutputMatcher(compiled, message.begin)
        matcher = matchers[message.slot]
        matcher.accept(message.ids)
        matcher.fill(words_SW, message.slot)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(connection, encode(MaskReady(message.slot, message.serial, matcher.failure)))


def _loaded(compressed: bytes, info: "xgrammar.TokenizerInfo") -> "xgrammar.CompiledGrammar":
    import xgrammar

    text = zlib.decompressobj().decompress(compressed, _MAX_TEXT_BYTES)
    return xgrammar.CompiledGrammar.deserialize_json(text.decode(), info)


if __name__ == "__main__":
    main()
