"""The grammars that rank 0 of a tensor-parallel group has loaded, each in a process of its own."""

import os
import queue
import socket
from concurrent.futures import ThreadPoolExecutor

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
            self._grammars[result.key] = grammar
        return result

    def drop(self, key: bytes) -> None:
        """End the process of a grammar, which no row uses any more."""
        self._dead.discard(key)
        if (grammar := self._grammars.pop(key, None)) is not None:
            grammar.close()

    def report_death(self, key: bytes, reason: str) -> None:
        """Let `next_loaded` report that the process of a grammar has ended; `drop` will be called."""
        if key not in self._dead:
            self._dead.add(key)
            self._num_loading += 1
            self._loaded.put((GrammarLoaded(key, reason, is_refused=True), None))

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
            result = GrammarLoaded(message.key), self._load(message)
        except Exception as error:  # of any kind: only the requests with this grammar fail
            reason = f"the grammar could not be loaded: {one_line(error, Exception)}"
            self._loaded.put((GrammarLoaded(message.key, reason), None))
        else:
            self._loaded.put(result)

    def _load(self, message: LoadGrammar) -> FollowedGrammar:
        """Start a process for the grammar. Raises ValueError for one that it cannot load, OSError."""
        ours, theirs = socket.socketpair()
        descriptor, masks = shared_masks(self._num_slots * self._masks_per_slot, self._num_words)
        try:
            with theirs:
                self._forks.pass_descriptors([theirs.fileno(), descriptor])
            ours.settimeout(_START_DEADLINE_S)
            start = StartMatcher(message.source, self._num_slots, self._num_words, self._masks_per_slot)
            write_frame(ours, encode(start))
            answer = read_frame(ours)
            if not answer:
                raise ValueError("its process has ended")
            if error := Decoder[MatcherStarted](MatcherStarted).decode(answer).error:
                raise ValueError(error)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(descriptor)
        return FollowedGrammar(message.key, ours, masks, self._num_slots, self._masks_per_slot)
