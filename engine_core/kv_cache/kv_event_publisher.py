"""Publishes KV events over ZeroMQ in vLLM's format, from a thread: the engine core never waits for it.

    PUB       out: [topic, sequence number, batch]
    ROUTER    in:  [identity, "", first sequence number]         ask for earlier messages
              out: [identity, "", topic, sequence number, batch] ...
                   [identity, "", "", 8 x 0xff, ""]              the end

Sequence numbers are 8 bytes, big-endian, from 0. A batch is msgpack, [time, events, data-parallel
rank]; blocks are named by unsigned 64-bit integers. What overflows a buffer is dropped, and shows as
a gap in the sequence numbers. vLLM's format knows neither keys nor encryption.
"""

import contextlib
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq

from atom.shared.config.kv_events import KVEventsConfig
from atom.shared.utils.logger import get_logger
from engine_core.kv_cache.kv_events import Cleared, KVEvent, Removed, Stored

_POLL_S = 0.05
_BUSY_POLL_S = 0.005  # while a replay is being sent
_STOP_S = 2.0
_LINGER_MS = 500
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Bytes of token ids that may wait for the publisher."""
MAX_REPLAY_BYTES = 256 * 1024 * 1024
"""Bytes of messages that are kept for replays."""
_MESSAGE_IDS = 4096
"""Token ids, or 4 for each removed block, after which a message ends."""
_MAX_REPLAYS = 8
_REPLAY_SLICE = 256  # messages of one replay, before the thread looks for new events
_REPLAY_HWM = 1000
_REPLAY_STALL_S = 10.0  # without progress: the reader is gone
_MAX_REQUEST_BYTES = 512  # of a subscription, or a request for a replay
_MAX_TOPICS = 1000
_SUBSCRIBE = b"\x01"
"""First byte of a subscriber's frame; the topic follows."""
_UNSUBSCRIBE = b"\x00"
"""Different topics of all subscriptions. ZeroMQ keeps some 50 bytes for each byte of a topic."""
_END = b"\xff" * 8
_WARN_EVERY_S = 60.0


class PublishError(RuntimeError):
    """An endpoint cannot be used; the text is one line that says what to change."""


class KVEventPublisher:
    """The sockets and the thread. `put` may be called by one thread, and never blocks."""

    def __init__(self, config: KVEventsConfig, rank: int, block_size: int):
        """`config` is that of the data-parallel rank `rank`. Raises PublishError."""
        self._config = config
        self._rank = rank
        self._block_size = block_size
        self._waiting: SimpleQueue[tuple[int, list[KVEvent]] | None] = SimpleQueue()
        """The events of one `put`, after the value of `num_dropped` then: the gap belongs before them."""
        self._put_bytes = self._taken_bytes = 0  # each is written by one thread
        self.num_dropped = 0
        """Calls of `put` whose events were dropped."""
        self._warned_at = -_WARN_EVERY_S
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._sockets = self._open()
        except PublishError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def put(self, events: list[KVEvent]) -> None:
        """Publish these events, or drop them when too much is waiting."""
        num_bytes = sum(len(event.token_ids) for event in events if isinstance(event, Stored))
        num_bytes *= self._block_size * 4
        full = self._waiting.qsize() >= self._config.max_queue_size
        if full or self._put_bytes - self._taken_bytes + num_bytes > MAX_WAITING_BYTES:
            self.num_dropped += 1
            self._warn()
            return
        self._put_bytes += num_bytes
        self._waiting.put((self.num_dropped, events))

    def close(self) -> None:
        """Publish what is waiting, for at most a moment, and close the sockets."""
        self._waiting.put(None)
        self._thread.join(_STOP_S)

    def _warn(self) -> None:
        if time.monotonic() - self._warned_at > _WARN_EVERY_S:
            self._warned_at = time.monotonic()
            get_logger().warning(
                "KV events are dropped: too many wait to be published (%d times so far)", self.num_dropped
            )

    def _open(self) -> "tuple[_Subscribers, zmq.Socket[bytes] | None]":
        config = self._config
        replay = None
        publish = _Subscribers(config)
        publish.open()
        if config.replay_endpoint is not None:
            replay = self._context.socket(zmq.ROUTER)
            replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            replay.setsockopt(zmq.SNDHWM, _REPLAY_HWM)
            replay.setsockopt(zmq.RCVHWM, _MAX_REPLAYS)
            replay.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
            replay.setsockopt(zmq.IPV6, int("[" in config.replay_endpoint))
            try:
                _attach(replay, "replay_endpoint", config.replay_endpoint, bind=True)
            except PublishError:
                publish.close(linger_ms=0)
                raise
        return publish, replay

    # The thread

    def _run(self) -> None:
        try:
            self._serve(*self._sockets)
        except Exception:
            get_logger().exception("no more KV events are published")
        finally:
            self._sockets[0].close(_LINGER_MS)
            self._context.destroy(linger=_LINGER_MS)

    def _serve(self, publish: "_Subscribers", replay: "zmq.Socket[bytes] | None") -> None:
        kept = _Kept(self._config.buffer_steps, self._config.topic.encode())
        num_dropped = 0
        replays = None if replay is None else _Replays(replay, kept)
        while True:
            try:
                wait_s = _BUSY_POLL_S if replays is not None and replays.is_busy else _POLL_S
                queued = self._waiting.get(timeout=wait_s)
            except Empty:
                queued = num_dropped, []
            if queued is None:
                break
            if queued[0] > num_dropped:
                num_dropped = queued[0]
                kept.skip()
            publish.read_subscriptions()
            for message in self._messages(queued[1]):
                publish.send([kept.topic, kept.number, message])
                kept.add(message)
            if replays is not None:
                replays.serve()

    def _messages(self, events: Sequence[KVEvent]) -> Iterator[bytes]:
        """The payloads of messages of bounded size."""
        batch: list[Any] = []
        size = 0
        for event in events:
            if isinstance(event, Stored):
                self._taken_bytes += len(event.token_ids) * self._block_size * 4
                size += len(event.token_ids) * self._block_size
            elif isinstance(event, Removed):
                size += 4 * len(event.digests)
            batch.append(self._encodable(event))
            if size >= _MESSAGE_IDS:
                yield self._encode(batch)
                batch = []
                size = 0
        if batch:
            yield self._encode(batch)

    def _encode(self, batch: list[Any]) -> bytes:
        return msgspec.msgpack.encode([time.time(), batch, self._rank])

    def _encodable(self, event: KVEvent) -> Any:
        fields: dict[str, Any] = {}
        match event:
            case Stored():
                kind = "BlockStored"
                fields = {
                    "block_hashes": _numbers(event.digests),
                    "parent_block_hash": _number(event.parent) if event.parent else None,
                    "token_ids": array("i", b"".join(event.token_ids)).tolist(),
                    "block_size": self._block_size,
                    "lora_id": None,
                    "medium": event.medium,
                    "lora_name": None,
                }
            case Removed():
                kind = "BlockRemoved"
                fields = {"block_hashes": _numbers(event.digests), "medium": event.medium}
            case Cleared():
                kind = "AllBlocksCleared"
        if self._config.event_format == "arrays":
            return [kind, *fields.values()]
        return {"type": kind, **fields}


class _Subscribers:
    """The PUB socket: an XPUB, which shows the subscriptions, so that their number can be bounded."""

    def __init__(self, config: KVEventsConfig):
        self._config = config
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._socket: zmq.Socket[bytes] | None = None
        self._num_topics = 0

    def open(self) -> None:
        """Raises PublishError."""
        # A context of its own: to end it waits until the address is free, which closing a socket does not.
        config = self._config
        self._context = zmq.Context()
        socket = self._context.socket(zmq.XPUB)
        socket.setsockopt(zmq.SNDHWM, config.hwm)
        # A call reads all that has come: with a longer queue a fast sender would keep it busy for ever.
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in config.endpoint))
        try:
            _attach(socket, "endpoint", config.endpoint, config.is_bound)
        except PublishError:
            self._context.destroy(linger=0)
            raise
        self._socket = socket
        self._num_topics = 0

    def close(self, linger_ms: int) -> None:
        """Wait at most so long for subscribers to take what was sent."""
        self._context.destroy(linger=linger_ms)
        self._socket = None

    def send(self, frames: list[bytes]) -> None:
        """To all subscribers. While the socket is being opened again, nothing is sent."""
        if self._socket is not None:
            self._socket.send_multipart(frames)

    def read_subscriptions(self) -> None:
        """Count the topics; too many of them close the socket, and a later call opens it again."""
        if self._socket is None:
            with contextlib.suppress(PublishError):  # the address may be free next time
                self.open()
            return
        for _ in range(_MAX_TOPICS):
            try:
                frame = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._num_topics += frame.startswith(_SUBSCRIBE) - frame.startswith(_UNSUBSCRIBE)
            if self._num_topics > _MAX_TOPICS:
                get_logger().warning(
                    "KV events: subscribers at %s are disconnected: they ask for over %d different topics",
                    self._config.endpoint,
                    _MAX_TOPICS,
                )
                self.close(linger_ms=0)
                return


class _Kept:
    """The latest messages, by their numbers, and the number of the next one."""

    def __init__(self, most: int, topic: bytes):
        self.topic = topic
        self.next = self.first = 0
        self._most = most
        self._messages: dict[int, bytes] = {}
        self._bytes = 0

    @property
    def number(self) -> bytes:
        """Sequence number of the next message, as a frame."""
        return _frame(self.next)

    def skip(self) -> None:
        """Leave a number out: what should have had it was dropped."""
        self.next += 1

    def add(self, message: bytes) -> None:
        """Keep the next message, and drop the oldest ones if there are too many."""
        self._messages[self.next] = message
        self._bytes += len(message)
        self.next += 1
        while self.next - self.first > self._most or self._bytes > MAX_REPLAY_BYTES:
            self._bytes -= len(self._messages.pop(self.first, b""))
            self.first += 1

    def get(self, number: int) -> bytes | None:
        """The message, if it is kept."""
        return self._messages.get(number)


class _Replays:
    """Sends kept messages to the readers that ask for them, some of each at a time."""

    def __init__(self, socket: "zmq.Socket[bytes]", kept: _Kept):
        self._socket = socket
        self._kept = kept
        self._readers: deque[_Reader] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a reader still waits for messages."""
        return bool(self._readers)

    def serve(self) -> None:
        """Read requests, as many as may run at once, and send each reader its next messages."""
        for _ in range(_MAX_REPLAYS):
            if len(self._readers) == _MAX_REPLAYS or not self._accept():
                break
        for _ in range(len(self._readers)):
            reader = self._readers.popleft()
            if self._send(reader):
                self._readers.append(reader)

    def _accept(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return False
        if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
            self._readers.append(_Reader(frames[0], int.from_bytes(frames[2], "big")))
        return True

    def _send(self, reader: "_Reader") -> bool:
        """Returns whether the reader must be served again."""
        kept = self._kept
        reader.next = max(reader.next, kept.first)
        for _ in range(_REPLAY_SLICE):
            ended = reader.next >= kept.next
            message = kept.get(reader.next)
            parts = [b"", _END, b""] if ended else [kept.topic, _frame(reader.next), message or b""]
            if ended or message is not None:
                try:
                    self._socket.send_multipart([reader.identity, b"", *parts], zmq.DONTWAIT)
                except zmq.ZMQError as error:
                    return error.errno == zmq.EAGAIN and not reader.is_stalled
                reader.sent_at = time.monotonic()
            if ended:
                return False
            reader.next += 1
        return True


class _Reader:
    """One request for a replay."""

    __slots__ = ("identity", "next", "sent_at")

    def __init__(self, identity: bytes, first: int):
        self.identity = identity
        self.next = first
        self.sent_at = time.monotonic()

    @property
    def is_stalled(self) -> bool:
        """Whether it has read nothing for too long."""
        return time.monotonic() - self.sent_at > _REPLAY_STALL_S


def _attach(socket: "zmq.Socket[bytes]", name: str, address: str, bind: bool) -> None:
    try:
        socket.bind(address) if bind else socket.connect(address)
    except zmq.ZMQError as error:
        raise PublishError(
            f"--kv-events-config: {name} {address} cannot be {'bound' if bind else 'connected to'}: "
            f'{error.strerror}; use another address, or "bind" to say which of the two is meant'
        ) from None


def _frame(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big")


def _numbers(digests: list[bytes]) -> list[int]:
    return [_number(digest) for digest in digests]
