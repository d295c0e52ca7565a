"""Which grammars the workers hold, and the requests that wait for theirs to be loaded, or for their turn.

A request has the key of its grammar. If the workers lack that, the frontend of one of its requests is
asked for it, and what it sends goes on to the workers; nothing of it is kept here. A frontend may have died,
or have taken the request of a dead one over, and lack its grammar until a client asks for the stream: the
frontends of the requests are asked in turn until one sends it. Idle grammars are dropped, the longest unused
first, where another one needs their memory.

A step waits for the masks of its rows. So of one grammar only as many requests run at a time as its process
can follow in `_STEP_US`; the others wait, in the order of their arrival.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from atom.shared.messages.grammar import (
    MAX_GRAMMAR_MEMORY,
    MAX_SOURCE_BYTES,
    DropGrammar,
    GetGrammar,
    Grammar,
    GrammarBytes,
    GrammarLoaded,
    LoadGrammar,
)
from engine_core.requests.request import Request, State

MAX_MEMORY = 8 * MAX_GRAMMAR_MEMORY
"""Bytes of all grammars that the workers hold at a time."""
MAX_GRAMMARS = 256
"""Each has a process of its own."""
_ASK_AGAIN_S = 1.0
_STEP_US = 20_000
_LEAST_TOKEN_US = 10  # the messages of a row take as long


@dataclass(slots=True)
class _Held:
    """A grammar that the workers hold or load, or that a frontend was asked for.

    References are weak: the prompts of requests that have ended are not kept in memory.
    """

    memory: int
    max_running: int
    """Requests that may run at a time."""
    asked: Request | None = None
    """The request whose frontend was asked for it last; None once it has come."""
    asked_at: float = 0.0
    is_loaded: bool = False
    running: list[weakref.ref[Request]] = field(default_factory=list)
    """Those that wait no longer, and some that have ended."""
    waiting: deque[weakref.ref[Request]] = field(default_factory=deque)
    """Those that wait for their turn, and some that have ended."""
    most_waiting: int = 64
    """With more, those that have ended are removed."""

    def add(self, requests: list[Request]) -> None:
        self.waiting += map(weakref.ref, requests)
        if len(self.waiting) > self.most_waiting:
            self.waiting = deque(map(weakref.ref, _unended(self.waiting)))
            self.most_waiting = max(64, 2 * len(self.waiting))

    @property
    def requests(self) -> list[Request]:
        """Those that have not ended."""
        return _unended(self.running) + _unended(self.waiting)

    @property
    def is_idle(self) -> bool:
        return self.is_loaded and not self.requests

    def next_running(self) -> list[Request]:
        """Those that may run now, in addition to those that do."""
        self.running = list(map(weakref.ref, _unended(self.running)))
        found: list[Request] = []
        while self.waiting and len(self.running) + len(found) < self.max_running:
            found += _unended([self.waiting.popleft()])
        self.running += map(weakref.ref, found)
        return found


class GrammarRegistry:
    """Holds requests with a grammar back until it is loaded, and until it is their turn."""

    def __init__(self, masks_per_step: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """A step needs so many masks of a request at most: one, and one after each of its drafts."""
        self._masks_per_step = masks_per_step
        self._clock = clock
        self._held: dict[bytes, _Held] = {}  # the longest unused first
        self._with_turns: dict[bytes, _Held] = {}
        """The grammars of which requests wait for their turn."""
        self._without_room: deque[tuple[Grammar, list[Request]]] = deque()
        self._waiting: dict[int, Request] = {}
        self._messages: list[LoadGrammar | DropGrammar] = []
        self._asked: dict[int, bytes] = {}  # key of the grammar that was asked for, by id of the request
        self._questions: list[tuple[bytes, GetGrammar]] = []

    @property
    def waiting(self) -> dict[int, Request]:
        """The requests that wait for their grammar or their turn, by id."""
        return self._waiting

    def add(self, grammar: Grammar, requests: list[Request]) -> list[Request]:
        """Those of the requests with this grammar that can be scheduled now; `loaded` and `retry` return the
        others later.
        """
        self._waiting |= {request.request_id: request for request in requests}
        held = self._held.pop(grammar.row.key, None)
        if held is not None:
            self._held[grammar.row.key] = held  # used last
            held.add(requests)
            return self._turns(grammar.row.key, held)
        if self._make_room(grammar.memory):
            self._load(grammar, requests)
        else:
            self._without_room.append((grammar, requests))
        return []

    def abort(self, request_ids: Iterable[int]) -> None:
        """End waiting requests; ids of others are ignored."""
        for request_id in request_ids:
            request = self._waiting.pop(request_id, None)
            if request is not None:
                request.state = State.ENDED
            if (key := self._asked.pop(request_id, None)) is not None:
                self._ask(key)
        self._without_room = deque(
            (grammar, requests)
            for grammar, requests in self._without_room
            if any(request.state is not State.ENDED for request in requests)
        )

    def provided(self, message: GrammarBytes) -> list[Request]:
        """A frontend has sent a grammar. Returns the requests to end, as theirs is too large."""
        held = self._held.get(message.key)
        if held is None or held.asked is None:
            return []  # another frontend was asked later, or no request is left
        del self._asked[held.asked.request_id]
        held.asked = None
        if len(message.source) <= MAX_SOURCE_BYTES:
            self._messages.append(LoadGrammar(message.key, message.source))
            return []
        del self._held[message.key]
        return held.requests

    def running(self, key: bytes) -> list[Request]:
        """The requests of a grammar that wait no longer, and have not ended."""
        held = self._held.get(key)
        return [] if held is None else _unended(held.running)

    def loaded(self, message: GrammarLoaded) -> tuple[list[Request], list[Request]]:
        """(requests that can be scheduled now, requests that fail with the message's error).

        Those that fail wait, or are scheduled: the caller ends them.
        """
        held = self._held.get(message.key)
        if held is None or (message.error and held.asked is not None):
            return [], []  # it is about a load before the grammar was dropped
        if message.is_lost:
            held.is_loaded = False
            self._ask(message.key)
            if message.key not in self._held:
                self._messages.append(DropGrammar(message.key))
            return [], []
        if not message.error:
            held.is_loaded = True
            return self._turns(message.key, held), []
        # It could not be loaded, or its process has ended.
        del self._held[message.key]
        self._with_turns.pop(message.key, None)
        self._messages.append(DropGrammar(message.key))
        return [], held.requests

    def retry(self) -> list[Request]:
        """Requests that can be scheduled now: it is their turn, or there is room for their grammar."""
        ready: list[Request] = []
        for key, held in list(self._with_turns.items()):
            ready += self._turns(key, held)
        while self._without_room:
            grammar, requests = self._without_room[0]
            requests = [request for request in requests if request.request_id in self._waiting]
            found = self._held.get(grammar.row.key)
            if requests and found is not None:
                found.add(requests)
                ready += self._turns(grammar.row.key, found)
            elif requests and self._make_room(grammar.memory):
                self._load(grammar, requests)
            elif requests:
                break
            self._without_room.popleft()
        return ready

    def messages(self) -> list[LoadGrammar | DropGrammar]:
        """What to send to every worker, before any later step."""
        messages = self._messages
        self._messages = []
        return messages

    def questions(self) -> list[tuple[bytes, GetGrammar]]:
        """What to ask frontends, by their identities."""
        if self._asked:
            due = self._clock() - _ASK_AGAIN_S
            for key in [key for key in self._asked.values() if self._held[key].asked_at <= due]:
                self._ask(key)
        questions = self._questions
        self._questions = []
        return questions

    def _turns(self, key: bytes, held: _Held) -> list[Request]:
        """The requests of a grammar whose turn it is; they wait no longer."""
        if not held.is_loaded:
            return []
        found = held.next_running()
        for request in found:
            del self._waiting[request.request_id]
        if held.waiting:
            self._with_turns[key] = held
        else:
            self._with_turns.pop(key, None)
        return found

    def _load(self, grammar: Grammar, requests: list[Request]) -> None:
        key = grammar.row.key
        token_us = max(grammar.token_us, _LEAST_TOKEN_US)
        max_running = max(1, _STEP_US // (token_us * self._masks_per_step))
        self._held[key] = held = _Held(grammar.memory, max_running)
        held.add(requests)
        self._ask(key)

    def _ask(self, key: bytes) -> None:
        """Ask the next frontend with a request for its grammar; without a request it is not needed."""
        held = self._held[key]
        before = held.asked
        if before is not None:
            self._asked.pop(before.request_id, None)
        by_frontend = {request.frontend: request for request in held.requests}
        if not by_frontend:
            del self._held[key]
            return
        frontends = list(by_frontend)
        place = frontends.index(before.frontend) + 1 if before and before.frontend in by_frontend else 0
        held.asked = by_frontend[frontends[place % len(frontends)]]
        held.asked_at = self._clock()
        self._asked[held.asked.request_id] = key
        self._questions.append((held.asked.frontend, GetGrammar(key)))

    def _make_room(self, memory: int) -> bool:
        """Drop idle grammars until one of this size fits."""
        total = memory + sum(held.memory for held in self._held.values())
        number = 1 + len(self._held)
        for key, held in list(self._held.items()):
            if total <= MAX_MEMORY and number <= MAX_GRAMMARS:
                return True
            if held.is_idle:
                del self._held[key]
                self._messages.append(DropGrammar(key))
                total -= held.memory
                number -= 1
        return total <= MAX_MEMORY and number <= MAX_GRAMMARS


def _unended(requests: Iterable[weakref.ref[Request]]) -> list[Request]:
    """Those that have not ended."""
    found = [request() for request in requests]
    return [request for request in found if request is not None and request.state is not State.ENDED]
