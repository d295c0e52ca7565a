"""Which grammars the workers hold, and the requests that wait for theirs to be loaded.

A request has the key of its grammar. If the workers lack that, the frontend of one of its requests is asked
for it, and what it sends goes on to the workers; nothing of it is kept here. Idle grammars are dropped, the
longest unused first, where another one needs their memory.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from atom.shared.messages.grammar import (
    MAX_COMPILED_BYTES,
    MAX_GRAMMAR_MEMORY,
    DropGrammar,
    GetGrammar,
    Grammar,
    GrammarBytes,
    GrammarLoaded,
    LoadGrammar,
)
from engine_core.request import Request, State

MAX_MEMORY = 8 * MAX_GRAMMAR_MEMORY
"""Bytes of all grammars that the workers hold at a time."""
MAX_GRAMMARS = 1024


@dataclass(slots=True)
class _Held:
    """A grammar that the workers hold or load, or that a frontend was asked for."""

    memory: int
    missing: set[int]
    """Ranks that have not loaded it."""
    asked: Request | None = None
    """The request whose frontend was asked for it; None once it has come."""
    users: list[weakref.ref[Request]] = field(default_factory=list)
    """All requests that use it, and some that have ended, whose prompts are not kept in memory."""
    most_users: int = 64
    """With more, those that have ended are removed."""

    def add(self, requests: list[Request]) -> None:
        self.users += map(weakref.ref, requests)
        if len(self.users) > self.most_users:
            self._remove_ended()
            self.most_users = max(64, 2 * len(self.users))

    @property
    def requests(self) -> list[Request]:
        """Those that have not ended."""
        found = [user() for user in self.users]
        return [request for request in found if request is not None and request.state is not State.ENDED]

    @property
    def is_idle(self) -> bool:
        self._remove_ended()
        return not self.users and not self.missing

    def _remove_ended(self) -> None:
        self.users = list(map(weakref.ref, self.requests))


class GrammarRegistry:
    """Holds requests with a grammar back until every rank has loaded it."""

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._held: dict[bytes, _Held] = {}  # the longest unused first
        self._without_room: deque[tuple[Grammar, list[Request]]] = deque()
        self._waiting: dict[int, Request] = {}
        self._messages: list[LoadGrammar | DropGrammar] = []
        self._asked: dict[int, bytes] = {}  # key of the grammar that was asked for, by id of the request
        self._questions: list[tuple[bytes, GetGrammar]] = []

    @property
    def waiting(self) -> dict[int, Request]:
        """The requests that wait for their grammar, by id."""
        return self._waiting

    def add(self, grammar: Grammar, requests: list[Request]) -> bool:
        """Whether requests with this grammar can be scheduled now; if not, `loaded` returns them later."""
        held = self._held.pop(grammar.row.key, None)
        if held is not None:
            self._held[grammar.row.key] = held  # used last
            held.add(requests)
            if not held.missing:
                return True
        elif self._make_room(grammar.memory):
            self._load(grammar, requests)
        else:
            self._without_room.append((grammar, requests))
        self._waiting |= {request.request_id: request for request in requests}
        return False

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
        """A frontend has sent a grammar. Returns requests that fail, as it is too large."""
        held = self._held.get(message.key)
        if held is None or held.asked is None:
            return []  # another frontend was asked later, or no request is left
        del self._asked[held.asked.request_id]
        held.asked = None
        if len(message.compiled) <= MAX_COMPILED_BYTES:
            self._messages.append(LoadGrammar(message.key, message.compiled))
            return []
        del self._held[message.key]
        return self._fail(held)

    def loaded(self, message: GrammarLoaded) -> tuple[list[Request], list[Request]]:
        """(requests that can be scheduled now, requests that fail with the message's error)."""
        held = self._held.get(message.key)
        if held is None or message.rank not in held.missing:
            return [], []  # of a grammar that another rank could not load
        held.missing.discard(message.rank)
        if held.missing and not message.error:
            return [], []
        if not message.error:
            return self._take_waiting(held), []
        del self._held[message.key]
        self._messages.append(DropGrammar(message.key))
        return [], self._fail(held)

    def retry(self) -> list[Request]:
        """Requests that can be scheduled now, of those for whose grammar there was no room."""
        ready: list[Request] = []
        while self._without_room:
            grammar, requests = self._without_room[0]
            requests = [request for request in requests if request.request_id in self._waiting]
            held = self._held.get(grammar.row.key)
            if requests and held is not None:
                held.add(requests)
                if not held.missing:
                    ready += [self._waiting.pop(request.request_id) for request in requests]
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
        questions = self._questions
        self._questions = []
        return questions

    def _load(self, grammar: Grammar, requests: list[Request]) -> None:
        key = grammar.row.key
        self._held[key] = held = _Held(grammar.memory, set(range(self._num_ranks)))
        held.add(requests)
        self._ask(key)

    def _ask(self, key: bytes) -> None:
        """Ask the frontend of a request for its grammar; without a request it is not needed."""
        held = self._held[key]
        held.asked = next(iter(held.requests), None)
        if held.asked is None:
            del self._held[key]
            return
        self._asked[held.asked.request_id] = key
        self._questions.append((held.asked.frontend, GetGrammar(key)))

    def _take_waiting(self, held: _Held) -> list[Request]:
        return [request for request in held.requests if self._waiting.pop(request.request_id, None)]

    def _fail(self, held: _Held) -> list[Request]:
        """End all requests with a grammar."""
        waiting = self._take_waiting(held)
        for request in waiting:
            request.state = State.ENDED
        return waiting

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
