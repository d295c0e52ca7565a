"""The compiled grammars that a worker has loaded."""

import queue
import threading
import zlib
from typing import TYPE_CHECKING

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.grammar import GrammarLoaded, LoadGrammar
from atom.shared.utils.errors import one_line
from workers.grammar.vocabulary import tokenizer_info

if TYPE_CHECKING:
    import xgrammar

_MAX_TEXT_BYTES = 128 * 1024 * 1024


class GrammarLibrary:
    """Loads grammars in a thread, alongside the steps; loading releases the GIL.

    What the first one needs does not: the import of xgrammar, and the bytes of each id of the vocabulary.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int):
        self._checkpoint = checkpoint
        self._rank = rank
        self._grammars: dict[bytes, xgrammar.CompiledGrammar] = {}
        self._waiting: queue.SimpleQueue[LoadGrammar] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[tuple[GrammarLoaded, xgrammar.CompiledGrammar | None]] = (
            queue.SimpleQueue()
        )
        self._num_loading = 0
        self._thread: threading.Thread | None = None
        self._info: xgrammar.TokenizerInfo | None = None

    @property
    def is_loading(self) -> bool:
        """Whether `next_loaded` will have a result."""
        return self._num_loading > 0

    def load(self, message: LoadGrammar) -> None:
        """Begin to load a grammar."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._load_all, name="grammars", daemon=True)
            self._thread.start()
        self._num_loading += 1
        self._waiting.put(message)

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
        """Forget a grammar; rows that use it keep it."""
        self._grammars.pop(key, None)

    def matcher(self, key: bytes, stop_ids: list[int]) -> "xgrammar.GrammarMatcher":
        """A matcher at the beginning of a text. Raises KeyError for a grammar that is not loaded."""
        import xgrammar

        return xgrammar.GrammarMatcher(self._grammars[key], override_stop_tokens=stop_ids)

    def _load_all(self) -> None:
        """Load the waiting grammars, one after another; runs in a thread."""
        while True:
            message = self._waiting.get()
            try:
                result = GrammarLoaded(self._rank, message.key), self._load(message.compiled)
            except Exception as error:  # of any kind: only the requests with this grammar fail
                reason = f"the grammar could not be loaded: {one_line(error, Exception)}"
                self._loaded.put((GrammarLoaded(self._rank, message.key, reason), None))
            else:
                self._loaded.put(result)

    def _load(self, compressed: bytes) -> "xgrammar.CompiledGrammar":
        import xgrammar

        if self._info is None:
            self._info = tokenizer_info(self._checkpoint)
        text = zlib.decompressobj().decompress(compressed, _MAX_TEXT_BYTES)
        return xgrammar.CompiledGrammar.deserialize_json(text.decode(), self._info)
