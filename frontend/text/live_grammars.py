"""The sources of the grammars of unfinished requests, which engine cores may ask for at any time."""

import threading
import weakref
from dataclasses import dataclass

from atom.shared.messages.grammar import CompiledGrammar, Grammar, RowGrammar
from frontend.errors import OverloadedError

__all__ = ["LiveGrammars"]

_RETRY_AFTER_S = 5


@dataclass(slots=True)
class _Live:
    source: bytes
    requests: int
    """Those that hold it."""


class LiveGrammars:
    """Each grammar once, whatever the number of its requests. Safe to use in any thread."""

    def __init__(self, max_bytes: int | None = None):
        self._max_bytes = max_bytes
        self._by_key: dict[bytes, _Live] = {}
        self._bytes = 0
        self._lock = threading.RLock()  # garbage collection may release one while another one is added

    def grammar(self, row: RowGrammar, compiled: CompiledGrammar) -> Grammar:
        """The grammar of a request: its source is kept as long as this object. Raises OverloadedError."""
        key = row.key
        with self._lock:
            live = self._by_key.get(key)
            if live is None:
                size = len(compiled.source)
                if self._max_bytes is not None and self._bytes + size > self._max_bytes:
                    raise OverloadedError(
                        f"the grammars of running requests take {self._bytes} bytes; try again later",
                        _RETRY_AFTER_S,
                    )
                self._bytes += size
                live = self._by_key[key] = _Live(compiled.source, 0)
            live.requests += 1
        grammar = Grammar(row, compiled.memory, compiled.token_us)
        weakref.finalize(grammar, self._release, key).atexit = False
        return grammar

    def source(self, key: bytes) -> bytes | None:
        """What to send to a core; None if no request holds it."""
        live = self._by_key.get(key)
        return None if live is None else live.source

    def _release(self, key: bytes) -> None:
        with self._lock:
            live = self._by_key[key]
            live.requests -= 1
            if not live.requests:
                del self._by_key[key]
                self._bytes -= len(live.source)
