"""When the ranks of engines in lockstep step together, and when they sleep.

A wave begins when a rank gets a batch while all sleep: it sends WaveStart to the others. It ends when no
rank has a step (`workers.shape_coordination`): all learn it in the same exchange, so that they count the
same waves, and a WaveStart of an earlier one has no effect.
"""

from collections.abc import Sequence

import zmq

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.worker import WaveStart
from atom.shared.utils.endpoint import bind, connect

__all__ = ["Waves"]


class Waves:
    """The waves as one rank sees them."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoints: Sequence[str], rank: int):
        """`endpoints` are those of every rank."""
        self.socket = context.socket(zmq.PULL)
        """Readable when another rank has sent a WaveStart."""
        bind(self.socket, endpoints[rank])
        self._decoder: Decoder[WaveStart] = Decoder(WaveStart)
        self._others = []
        for endpoint in [*endpoints[:rank], *endpoints[rank + 1 :]]:
            socket = context.socket(zmq.PUSH)
            connect(socket, endpoint)
            self._others.append(socket)
        self._number = 0
        self._started = -1

    @property
    def is_awake(self) -> bool:
        """Whether a wave has begun."""
        return self._started >= self._number

    def begin(self) -> None:
        """Wake the other ranks, unless they are awake: this one has a step."""
        if self.is_awake:
            return
        self._started = self._number
        frame = encode(WaveStart(self._number))
        for socket in self._others:
            socket.send(frame, zmq.DONTWAIT)

    def end(self) -> None:
        """End the wave: the ranks have agreed that none has a step."""
        self._number += 1

    def receive(self) -> None:
        """Read what other ranks have sent; does not wait."""
        while self.socket.poll(0):
            self._started = max(self._started, self._decoder.decode(self.socket.recv()).wave)

    def close(self) -> None:
        """Close the sockets."""
        for socket in (self.socket, *self._others):
            socket.close(0)
