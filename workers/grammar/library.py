"""The grammars that rank 0 of a tensor-parallel group has loaded, each in a process of its own."""

import contextlib
import os
import queue
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.grammar import (
    GrammarLoaded,
    GrammarMatcherLaunch,
    LoadGrammar,
    MatcherStarted,
    StartMatcher,
)
from atom.shared.utils.errors import one_line
from atom.shared.utils.fork_server import ForkServer
from workers.grammar.followed import KEPT_OUTPUTS, FollowedGrammar, shared_masks
from workers.grammar.frame_socket import read_frame, write_frame
from workers.grammar.output_matcher import WORD_BITS

_MODULE = "workers.grammar.matcher_process"
_START_DEADLINE_S = 120.0
_MAX_PARALLEL = 4
_FROM_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _LostError(Exception):
    """The process that forks has ended, and its forks with it."""


class GrammarLibrary:
    """Loads grammars in threads, alongside the steps.

    The first one starts the process that forks for each grammar: it imports xgrammar, and computes the bytes
    of each id of the vocabulary.
    """

    def __init__(self, checkpoint: Checkpoint, max_rows: int, num_drafts: int = 0):
        self._forks = ForkServer(_MODULE, lambda fd: GrammarMatcherLaunch(checkpoint, fd))
        self._num_slots = max_rows + KEPT_OUTPUTS + 1
        self._num_words = -(-checkpoint.vocab_size // WORD_BITS)
        self._masks_per_slot = 1 + num_drafts
        self._grammars: dict[bytes, FollowedGrammar] = {}
        self._dead: set[bytes] = set()
        self._died: set[bytes] = set()
        """Grammars whose own process was killed once, while that which forks went on."""
        self._loaded: queue.SimpleQueue[tuple[GrammarLoaded, FollowedGrammar | None]] = queue.SimpleQueue()
        self._num_loading = 0
        self._threads = ThreadPoolExecutor(_MAX_PARALLEL, thread_name_prefix="grammars")

    @property
    def is_loading(self) -> bool:
        """Whether `next_loaded` will have a result."""
        return self._num_loading > 0

    def load(self, message: LoadGrammar) -> None:
        """Begin to load a grammar."""
        self._num_loading += 1
        self._threads.submit(self._try_to_load, message)

    def next_loaded(self) -> GrammarLoaded | None:
        """The result of a `load` that has ended; None if there is none yet."""
        if not self._num_loading or self._loaded.empty():
            return None
        result, grammar = self._loaded.get()
        self._num_loading -= 1
        if grammar is not None:
            self._dead.discard(result.key)
            self._grammars[result.key] = grammar  # rows may still have one that is lost
        return result

    def drop(self, key: bytes) -> None:
        """End the process of a grammar, which no row uses any more."""
        self._dead.discard(key)
        self._died.discard(key)
        if (grammar := self._grammars.pop(key, None)) is not None:
            grammar.close()

    def report_death(self, grammar: FollowedGrammar, reason: str) -> None:
        """Let `next_loaded` report once that the process of a grammar has ended.

        If it was killed, or its parent has ended, it is lost, and `load` will be called. If it has ended by
        its own fault, or was killed twice, `drop` will be called, and `reason` is reported.
        """
        if grammar.key not in self._dead and self._grammars.get(grammar.key) is grammar:
            self._dead.add(grammar.key)
            self._num_loading += 1
            threading.Thread(target=self._find_cause, args=(grammar, reason), daemon=True).start()

    def followed(self, key: bytes) -> FollowedGrammar:
        """Where outputs of a grammar are followed. Raises KeyError for one that is not loaded."""
        return self._grammars[key]

    def close(self) -> None:
        """End all processes."""
        for key in list(self._grammars):
            self.drop(key)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._forks.close()

    def _try_to_load(self, message: LoadGrammar) -> None:
        """Load a grammar; runs in a thread."""
        try:
            try:
                grammar = self._load(message)
            except _LostError:
                grammar = self._load(message)  # by the next process that forks
            result = GrammarLoaded(message.key), grammar
        except Exception as error:  # of any kind: only the requests with this grammar fail
            reason = f"the grammar could not be loaded: {one_line(error, Exception)}"
            self._loaded.put((GrammarLoaded(message.key, reason), None))
        else:
            self._loaded.put(result)

    def _find_cause(self, grammar: FollowedGrammar, reason: str) -> None:
        """Tell why the process of a grammar has ended; runs in a thread.

        The system may have killed it for what others do: only the second time the grammar is blamed.
        """
        is_lost = not _is_own_fault(grammar.pid)
        if is_lost and not self._forks.has_ended(grammar.parent):
            is_lost = grammar.key not in self._died
            self._died.add(grammar.key)
        if is_lost:
            self._loaded.put((GrammarLoaded(grammar.key, is_lost=True), None))
        else:
            self._loaded.put((GrammarLoaded(grammar.key, reason, is_refused=True), None))

    def _load(self, message: LoadGrammar) -> FollowedGrammar:
        """Start a process for the grammar.

        Raises ValueError for one that it cannot load, OSError, or _LostError.
        """
        ours, theirs = socket.socketpair()
        descriptor, masks = shared_masks(self._num_slots * self._masks_per_slot, self._num_words)
        try:
            with theirs:
                parent = self._forks.pass_descriptors([theirs.fileno(), descriptor])
            ours.settimeout(_START_DEADLINE_S)
            start = StartMatcher(message.source, self._num_slots, self._num_words, self._masks_per_slot)
            answer = b""
            with contextlib.suppress(ConnectionError):
                write_frame(ours, encode(start))
                answer = read_frame(ours)
            if not answer:
                error_type = _LostError if self._forks.has_ended(parent) else ValueError
                raise error_type("its process has ended")
            started = Decoder[MatcherStarted](MatcherStarted).decode(answer)
            if started.error:
                raise ValueError(started.error)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(descriptor)
        return FollowedGrammar(
            message.key, ours, masks, self._num_slots, self._masks_per_slot, started.pid, parent
        )


def _is_own_fault(pid: int) -> bool:
    """Whether a process has ended by its limits on CPU time and memory, or by an error; False if unknown.

    The system tells it of a process that its parent has not reaped, which that does before the next fork.
    """
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
    except OSError:
        return False
    return status != 0 and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) in _FROM_OTHERS)
