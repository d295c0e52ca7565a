"""vLLM's published format of KV events, as its classes define it: maps in 0.32, arrays before."""

import time

import msgspec
import zmq

DEADLINE_MS = 20_000


class MapEvent(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class BlockStored(MapEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class BlockRemoved(MapEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(MapEvent):
    pass


class MapBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class ArrayEvent(msgspec.Struct, array_like=True, tag=True, omit_defaults=True):
    pass


class StoredArray(ArrayEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class RemovedArray(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class ClearedArray(ArrayEvent, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


BATCHES = {"maps": MapBatch, "arrays": ArrayBatch}


class Subscriber:
    """A SUB socket, connected to `address`."""

    def __init__(self, address: str, topic: bytes = b"", hwm: int = 1000):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, hwm)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(address)
        assert monitor.poll(DEADLINE_MS), f"no publisher at {address}"
        self.socket.disable_monitor()
        monitor.close(0)
        time.sleep(0.1)  # the subscription follows the handshake

    def receive(self) -> tuple[bytes, int, bytes]:
        """Topic, number and payload of the next message."""
        assert self.socket.poll(DEADLINE_MS), "no message in time"
        topic, number, payload = self.socket.recv_multipart()
        return topic, int.from_bytes(number, "big"), payload

    def batch(self) -> MapBatch:
        """The next batch, of maps."""
        return msgspec.msgpack.decode(self.receive()[2], type=MapBatch)

    def close(self) -> None:
        self._context.destroy(linger=0)


def replay(address: str, first: int) -> list[tuple[int, bytes]]:
    """Number and payload of the messages from `first` on, up to the end of the replay."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[int, bytes]] = []
        while True:
            assert socket.poll(DEADLINE_MS), "the replay does not end"
            empty, _, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))
