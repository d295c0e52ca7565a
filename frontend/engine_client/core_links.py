"""The links of the offline library to all engine cores, read in the calling thread.

No link is reopened: the library ends with the first engine that ends. Compared with `EngineClient`, a token
takes less than half the CPU time, since there are neither streams nor an event loop.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from atom.shared.messages.engine import Abort, AddRequest, FromCore, ToCore
from atom.shared.messages.grammar import GetGrammar, GrammarBytes
from atom.shared.messages.launch import EngineAddress
from frontend.engine_client.dp_router import Charge, DPRouter, RoutedPrompt
from frontend.engine_client.engine_link import EngineLink

__all__ = ["CoreLinks"]


class CoreLinks:
    """Sends each request to the engine that `router` chooses, and grammars to those that ask for one.

    `grammar_source` gives the encoded source of an unfinished request, by its key.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        engines: Iterable[EngineAddress],
        router: DPRouter,
        grammar_source: Callable[[bytes], bytes | None] = lambda key: None,
    ):
        self._grammar_source = grammar_source
        self._links = {address.rank: EngineLink(context, address.endpoint, 0) for address in engines}
        self._router = router
        self._charges: dict[int, Charge] = {}  # by request id
        self._poller = zmq.Poller()
        self._readable: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._links)

    def connect(self) -> None:
        """Connect to all engines; each one sends CoreReady."""
        for link in self._links.values():
            link.connect()
            self._poller.register(link.socket, zmq.POLLIN)

    def add(self, request: AddRequest) -> None:
        """Send a request; call `end` for each of its sequences."""
        routed = RoutedPrompt(
            request.prompt_ids, request.max_tokens, len(request.request_ids), request.cache_salt
        )
        charge = self._router.route(routed, list(self._links))
        self._charges.update(dict.fromkeys(request.request_ids, charge))
        self._links[charge.rank].send(request)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Tell the engines to end these sequences; `end` each of them, too."""
        by_rank: dict[int, list[int]] = {}
        for request_id in request_ids:
            by_rank.setdefault(self._charges[request_id].rank, []).append(request_id)
        for rank, ids in by_rank.items():
            self._links[rank].send(Abort(ids))

    def end(self, request_id: int) -> None:
        """Count a sequence as ended: its engine has room for another."""
        self._router.release(self._charges.pop(request_id))

    def send_to_all(self, message: ToCore) -> None:
        """Send a message to every engine."""
        for link in self._links.values():
            link.send(message)

    def receive(self, timeout_s: float) -> tuple[int, FromCore] | None:
        """(rank, message), from the engines in turn; None after the timeout or another message."""
        if not self._readable:
            sockets = dict(self._poller.poll(int(timeout_s * 1000)))
            self._readable.extend(rank for rank, link in self._links.items() if link.socket in sockets)
        if not self._readable:
            return None
        rank = self._readable.popleft()
        link = self._links[rank]
        message = link.decode(link.socket.recv(zmq.DONTWAIT))
        if isinstance(message, GetGrammar):
            if (source := self._grammar_source(message.key)) is not None:
                link.send(GrammarBytes(message.key, source))
            return None
        return rank, message
