import threading

import pytest
import zmq

from atom.shared.messages.admin import Done
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import AddRequest, Sampling, ToCore, pack_ids
from atom.shared.messages.resume import (
    Claimed,
    ClaimedRequest,
    ClaimedSequence,
    GetStream,
    HandedStream,
    Resumable,
    TakeStreams,
)
from atom.supervisor import Supervisor, handed_streams
from atom.supervisor.handed_streams import HandedStreams, take_streams


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def claimed(key: str, left_s: float = 30.0, tenant: str = "", size: int = 2) -> Claimed:
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0)
    request = AddRequest(
        [1], pack_ids(range(3)), 10, sampling, tenant=tenant, resumable=Resumable(key, b"form", 1, 1)
    )
    sequence = ClaimedSequence(1, pack_ids(range(size)))
    return Claimed(0, key, [ClaimedRequest(encode(request), [sequence])], left_s=left_s)


def ask(streams: HandedStreams, key: str, tenant: str = "") -> HandedStream:
    return streams.take(GetStream(0, 9, key, tenant))


def test_a_stream_is_given_once_and_to_its_tenant_alone() -> None:
    streams = HandedStreams()
    streams.add(claimed("k", tenant="t"))
    assert ask(streams, "k") == ask(streams, "other", "t") == HandedStream(9)
    assert ask(streams, "k", "t") == HandedStream(9, [claimed("k", tenant="t")])
    assert ask(streams, "k", "t") == HandedStream(9)


def test_what_two_engines_had_comes_together_once_the_earlier_server_has_ended() -> None:
    streams = HandedStreams()
    streams.is_pending = True
    streams.add(claimed("k"))
    assert ask(streams, "k") == HandedStream(9, is_pending=True)
    streams.add(claimed("k", size=3))
    streams.is_pending = False
    assert len(ask(streams, "k").claimed) == 2


def test_streams_of_another_model_are_refused_with_the_difference() -> None:
    streams = HandedStreams()
    streams.is_pending = True
    streams.difference = "config.json's x"
    streams.add(claimed("k"))
    assert ask(streams, "k") == HandedStream(9, refusal="config.json's x")
    assert list(streams.take_all()) == []


def test_streams_expire_and_the_next_server_gets_the_time_that_is_left() -> None:
    clock = Clock()
    streams = HandedStreams(clock)
    streams.add(claimed("short", 10.0))
    streams.add(claimed("long", 30.0))
    clock.now = 20.0
    assert ask(streams, "short") == HandedStream(9)
    assert list(streams.take_all()) == [claimed("long", 10.0)] and len(streams) == 0


def test_a_stream_without_a_client_frees_its_memory() -> None:
    clock = Clock()
    streams = HandedStreams(clock)
    streams.add(claimed("taken", 10.0))
    ask(streams, "taken")
    streams.add(claimed("taken", 30.0))
    for number in range(3):
        streams.add(claimed(str(number), 10.0 + number))
    clock.now = 11.0
    streams.expire()
    assert len(streams) == 2
    clock.now = 29.0
    streams.expire()
    assert len(streams) == 1 and ask(streams, "taken").claimed
    assert streams._bytes == 0


def test_a_supervisor_drops_streams_in_time() -> None:
    with Supervisor() as supervisor:
        supervisor.handed.add(claimed("k", 0.0))
        supervisor.check(0.0)
        assert len(supervisor.handed) == 0


def test_the_oldest_streams_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handed_streams, "_MAX_BYTES", 10_000)
    streams = HandedStreams()
    for number in range(9):
        streams.add(claimed(str(number), size=100))
    assert 0 < len(streams) < 5 and ask(streams, "8").claimed


def test_all_streams_of_a_core_are_taken_in_several_answers() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    keys = ["a", "b", "c"]

    def core() -> None:
        decoder = Decoder[ToCore](ToCore)
        while keys:
            identity, frame = router.recv_multipart()
            question = decoder.decode(frame)
            assert isinstance(question, TakeStreams)
            router.send_multipart([identity, encode(claimed(keys.pop(0)))])
            router.send_multipart([identity, encode(Done(question.number, len(keys)))])

    thread = threading.Thread(target=core)
    thread.start()
    assert [each.key for each in take_streams(context, f"tcp://127.0.0.1:{port}")] == ["a", "b", "c"]
    thread.join()
    context.destroy(0)
