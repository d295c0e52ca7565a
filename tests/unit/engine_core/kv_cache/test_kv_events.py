"""KV events: what is published, in which format, and what an unkind subscriber costs."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from atom.shared.config.cache import CacheConfig
from atom.shared.config.fields import ConfigError
from atom.shared.config.kv_events import DEFAULT_ENDPOINT, KVEventsConfig, kv_events_config
from atom.shared.messages.engine import pack_ids
from engine_core.kv_cache import kv_event_publisher
from engine_core.kv_cache.kv_event_publisher import KVEventPublisher, PublishError
from engine_core.kv_cache.kv_events import Cleared, KVEvent, KVEventLog, Removed, Stored
from tests.helpers.servers.kv_events import BATCHES, MapBatch, Subscriber, replay

BLOCK = 4
Publish = Callable[..., KVEventPublisher]
Subscribe = Callable[..., Subscriber]


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big")


def stored(first: int, count: int, parent: bytes = b"") -> Stored:
    """`count` blocks from number `first` on."""
    numbers = range(first, first + count)
    return Stored(parent, [digest(one) for one in numbers], [pack_ids([one] * BLOCK) for one in numbers])


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Publish]:
    """Makes publishers on local sockets."""
    made = []
    config = KVEventsConfig(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")

    def make(rank: int = 0, **options: Any) -> KVEventPublisher:
        made.append(KVEventPublisher(replace(config, **options), rank, BLOCK))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def subscribe(tmp_path: Path) -> Iterator[Subscribe]:
    """Makes subscribers of these publishers."""
    made = []

    def make(topic: bytes = b"", hwm: int = 1000) -> Subscriber:
        made.append(Subscriber(f"ipc://{tmp_path}/events", topic, hwm))
        return made[-1]

    yield make
    for subscriber in made:
        subscriber.close()


def test_consecutive_blocks_are_one_event_and_known_ones_none() -> None:
    log = KVEventLog(BLOCK)
    ids = [pack_ids([number] * BLOCK) for number in range(3)]
    log.stored(digest(1), ids[0])
    log.stored(digest(2), digest(1) + ids[1])
    log.stored(digest(2), digest(1) + ids[1])
    log.stored(digest(9), digest(7) + ids[2])
    log.removed(digest(5))
    log.removed(digest(2))
    log.removed(digest(1))
    assert log.take() == [
        Stored(b"", [digest(1), digest(2)], ids[:2]),
        Stored(digest(7), [digest(9)], ids[2:]),
        Removed([digest(2), digest(1)]),
    ]
    log.stored(digest(1), ids[0])
    log.cleared()
    assert log.take() == [Cleared()] and log.take() == []
    log.removed(digest(9))
    assert log.take() == []


@pytest.mark.parametrize("event_format", ["maps", "arrays"])
def test_frames_are_those_that_vllm_publishes(
    publish: Publish, subscribe: Subscribe, event_format: str
) -> None:
    publisher = publish(rank=3, topic="kv@pod@model", event_format=event_format)
    subscriber = subscribe(b"kv@")
    before = time.time()
    publisher.put([stored(1, 2), Removed([digest(1)])])
    publisher.put([stored(3, 1, b"\xff" * 8), Cleared()])
    events = []
    for number in range(2):
        topic, sequence, payload = subscriber.receive()
        assert (topic, sequence) == (b"kv@pod@model", number)
        batch = msgspec.msgpack.decode(payload, type=BATCHES[event_format])
        assert before <= batch.ts <= time.time() and batch.data_parallel_rank == 3
        events += batch.events
    first, second = events[0], events[2]
    assert (first.block_hashes, first.parent_block_hash) == ([1, 2], None)
    assert (first.token_ids, first.block_size, first.medium) == ([1] * 4 + [2] * 4, BLOCK, "GPU")
    assert (second.block_hashes, second.parent_block_hash) == ([3], 2**64 - 1)
    assert (events[1].block_hashes, events[1].medium) == ([1], "GPU")
    kinds = [one.__struct_config__.tag for one in events]
    assert kinds == ["BlockStored", "BlockRemoved", "BlockStored", "AllBlocksCleared"]


def test_a_long_prompt_is_several_messages(publish: Publish, subscribe: Subscribe) -> None:
    publisher, subscriber = publish(), subscribe()
    publisher.put([stored(64 * index, 64) for index in range(100)])
    hashes: list[int] = []
    sizes = []
    while len(hashes) < 6400:
        _, number, payload = subscriber.receive()
        assert number == len(sizes)
        sizes.append(len(payload))
        for event in msgspec.msgpack.decode(payload, type=MapBatch).events:
            hashes += event.block_hashes  # type: ignore[union-attr]
    assert hashes == list(range(6400)) and len(sizes) == 7 and max(sizes) < 64 * 1024


def test_a_replay_has_what_was_missed(publish: Publish, tmp_path: Path) -> None:
    publisher, address = publish(buffer_steps=5), f"ipc://{tmp_path}/replay"
    for number in range(8):
        publisher.put([stored(number, 1)])
    found = replay(address, 0)
    while not found or found[-1][0] < 7:  # the thread has published all
        found = replay(address, 0)
    assert [number for number, _ in found] == [3, 4, 5, 6, 7]
    assert [number for number, _ in replay(address, 6)] == [6, 7]
    assert replay(address, 8) == [] and replay(address, 2**64 - 1) == []
    events = [msgspec.msgpack.decode(payload, type=MapBatch).events[0] for _, payload in found]
    assert [event.block_hashes[0] for event in events] == [3, 4, 5, 6, 7]  # type: ignore[union-attr]


def test_bad_requests_for_replays_change_nothing(publish: Publish, tmp_path: Path) -> None:
    publisher, address = publish(), f"ipc://{tmp_path}/replay"
    publisher.put([stored(1, 1)])
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        for _ in range(200):
            socket.send_multipart([b"", os.urandom(7)])
            socket.send_multipart([os.urandom(20)])
            socket.send_multipart([b"x", bytes(8)])
            socket.send_multipart([b"", bytes(8), b"more"])
        assert [number for number, _ in replay(address, 0)] == [0]
        assert not socket.poll(0)


def test_readers_that_ask_and_do_not_read_delay_nothing(
    publish: Publish, subscribe: Subscribe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_publisher, "_REPLAY_STALL_S", 0.3)
    publisher, subscriber = publish(), subscribe(hwm=10_000)
    for number in range(3000):
        publisher.put([stored(number, 1)])
    with zmq.Context() as context:
        deaf = [context.socket(zmq.DEALER) for _ in range(20)]  # more than are served at a time
        for socket in deaf:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.connect(f"ipc://{tmp_path}/replay")
            for _ in range(50):
                socket.send_multipart([b"", bytes(8)])
        times = []
        for number in range(3000, 4000):
            start = time.thread_time()
            publisher.put([stored(number, 1)])
            times.append(time.thread_time() - start)
        assert [subscriber.receive()[1] for _ in range(4000)] == list(range(4000))
        assert sorted(times)[-5] < 0.01  # but for garbage collections
        context.destroy(linger=0)


def test_a_subscriber_that_does_not_read_loses_messages_and_the_others_none(
    publish: Publish, subscribe: Subscribe
) -> None:
    publisher = publish(hwm=200)
    deaf = [subscribe(hwm=1) for _ in range(5)]
    reader = subscribe()
    for number in range(2000):
        publisher.put([stored(64 * number, 64)])
        assert reader.receive()[1] == number
    numbers = []
    while deaf[0].socket.poll(200):
        numbers.append(deaf[0].receive()[1])
    assert numbers == sorted(numbers) and numbers[0] == 0 and len(numbers) < 2000


def test_what_overflows_is_a_gap_in_the_numbers(
    publish: Publish, subscribe: Subscribe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_publisher, "MAX_WAITING_BYTES", 2000)
    publisher, subscriber = publish(), subscribe()
    publisher.put([stored(0, 100)])
    assert subscriber.receive()[1] == 0
    publisher.put([stored(0, 126)])
    assert publisher.num_dropped == 1
    publisher.put([stored(1, 1)])
    assert subscriber.receive()[1] == 2
    assert [number for number, _ in replay(f"ipc://{tmp_path}/replay", 0)] == [0, 2]


def test_the_gap_is_where_events_were_dropped(
    publish: Publish, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, subscriber = publish(max_queue_size=3), subscribe()
    encode, may_go_on = publisher._encode, threading.Event()

    def encode_later(batch: list[Any]) -> bytes:
        may_go_on.wait(60)
        return encode(batch)

    monkeypatch.setattr(publisher, "_encode", encode_later)
    publisher.put([stored(0, 1)])
    while publisher._waiting.qsize():
        time.sleep(0.001)
    for number in range(1, 5):  # the last one is dropped
        publisher.put([stored(number, 1)])
    may_go_on.set()
    assert [subscriber.receive()[1] for _ in range(4)] == [0, 1, 2, 3]
    publisher.put([stored(5, 1)])
    assert subscriber.receive()[1] == 5


def test_a_flood_of_subscriptions_is_bounded_and_the_others_come_back(publish: Publish) -> None:
    publisher = publish()
    with zmq.Context() as context:
        flood, reader = context.socket(zmq.SUB), context.socket(zmq.SUB)
        for socket in (flood, reader):
            socket.setsockopt(zmq.RECONNECT_IVL, 10)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(publisher._config.endpoint)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        publisher.put([Cleared()])
        for number in range(2 * kv_event_publisher._MAX_TOPICS):
            flood.setsockopt(zmq.SUBSCRIBE, b"%d" % number)
        subscribers = publisher._sockets[0]
        deadline = time.monotonic() + 60
        while subscribers._socket is not None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        flood.close(linger=0)
        newest = -1
        while newest < 3 or subscribers._socket is None:
            publisher.put([Cleared()])
            if reader.poll(50):
                newest = int.from_bytes(reader.recv_multipart()[1], "big")
            assert time.monotonic() < deadline
        context.destroy(linger=0)


def test_a_full_queue_drops_and_put_never_waits(publish: Publish) -> None:
    publisher = publish(max_queue_size=1)
    events: list[KVEvent] = [stored(0, 64) for _ in range(50)]
    for _ in range(300):
        publisher.put(events)
    assert publisher.num_dropped > 0


def test_a_used_address_is_named(publish: Publish, tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(PublishError, match=f"endpoint tcp://127.0.0.1:{port} cannot be bound: Address"):
            publish(endpoint=f"tcp://127.0.0.1:{port}")


def test_a_publisher_may_connect_to_its_subscriber(publish: Publish) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        publisher = publish(endpoint=f"tcp://127.0.0.1:{port}", bind=False)
        deadline = time.monotonic() + 60
        while not subscriber.poll(50):
            assert time.monotonic() < deadline
            publisher.put([Cleared()])
        assert msgspec.msgpack.decode(subscriber.recv_multipart()[2], type=MapBatch).events


def config_of(text: str, ranks: int = 1, caching: bool = True) -> KVEventsConfig | None:
    return kv_events_config(CacheConfig(kv_events_config=text, enable_prefix_caching=caching), ranks)


@pytest.mark.parametrize(
    "text", ["{}", '{"publisher": "zmq"}', '{"enable_kv_cache_events": true, "publisher": "null"}']
)
def test_events_are_off(text: str) -> None:
    assert config_of(text) is None
    assert config_of(text, caching=False) is None


def test_the_default_is_bound_to_loopback_with_a_port_for_each_rank() -> None:
    config = config_of('{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:6000"}', ranks=3)
    assert config is not None and config.endpoint == DEFAULT_ENDPOINT and config.is_bound
    assert config.of_rank(0) is config
    assert config.of_rank(2).endpoint == "tcp://127.0.0.1:5559"
    assert config.of_rank(2).replay_endpoint == "tcp://*:6002"
    assert replace(config, endpoint="ipc:///run/kv").of_rank(1).endpoint == "ipc:///run/kv_dp1"


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://localhost:5557", True),
        ("ipc:///run/kv", True),
        ("tcp://10.0.0.5:5557", False),
        ("tcp://manager.kv.svc:5557", False),
        ("tcp://[fd00::5]:5557", False),
    ],
)
def test_an_address_of_a_subscriber_is_connected_to(endpoint: str, bound: bool) -> None:
    config = config_of(msgspec.json.encode({"enable_kv_cache_events": True, "endpoint": endpoint}).decode())
    assert config is not None and config.is_bound is bound
    assert replace(config, bind=not bound).is_bound is not bound


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"endpoints": "x"}, "endpoints is not supported; use enable_kv_cache_events, publisher, endpoint"),
        ({"publisher": "kafka"}, "publisher 'kafka' is not supported"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events is 1: use true or false"),
        ({"endpoint": "inproc://kv"}, "endpoint is 'inproc://kv': it must be tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://*:0"}, "it must be tcp://ADDRESS:PORT"),
        ({"endpoint": None}, "endpoint is None"),
        ({"hwm": 0}, "hwm is 0: it must be a whole number from 1 to 1000000"),
        ({"buffer_steps": True}, "buffer_steps is True"),
        ({"event_format": "bytes"}, "event_format is 'bytes': it must be maps or arrays"),
        ({"bind": "yes"}, "bind is 'yes': it must be true, false or null"),
        ({"topic": "x" * 257}, "it must be a printable text of at most 256 bytes"),
        ({"topic": "kv\n"}, "it must be a printable text"),
        ({"replay_endpoint": DEFAULT_ENDPOINT}, "endpoint and replay_endpoint are the same address"),
        ({"endpoint": "tcp://*:65535"}, "rank 1 would need port 65536"),
    ],
)
def test_a_bad_configuration_is_refused(given: dict[str, Any], message: str) -> None:
    text = msgspec.json.encode({"enable_kv_cache_events": True, **given}).decode()
    with pytest.raises(ConfigError) as refused:
        config_of(text, ranks=2)
    assert str(refused.value).startswith("--kv-events-config: ") and message in str(refused.value)


def test_without_prefix_caching_there_is_nothing_to_publish() -> None:
    with pytest.raises(ConfigError, match="no block is cached without prefix caching"):
        config_of('{"enable_kv_cache_events": true}', caching=False)
