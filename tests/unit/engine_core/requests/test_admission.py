"""Whatever a frontend sends: the core refuses it or serves it, and goes on."""

import math
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import (
    Abort,
    AddRequest,
    FinishReason,
    GetStats,
    LogitsProcessors,
    ToCore,
    pack_ids,
)
from atom.shared.messages.worker import FullAttentionSpec, ScheduledBatch
from engine_core.links import FrontendLink
from engine_core.requests.admission import check_request
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import GREEDY, CoreDriver

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)
MAX_MODEL_LEN = 24
INT32, UINT64 = (1 << 31) - 1, (1 << 64) - 1
GOOD = AddRequest([1], pack_ids([1, 2, 3]), 4, GREEDY)
replace = msgspec.structs.replace


def with_sampling(**fields: Any) -> AddRequest:
    return replace(GOOD, sampling=replace(GREEDY, **fields))


def with_rules(**fields: Any) -> AddRequest:
    return with_sampling(logits_processors=LogitsProcessors(**fields))


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (replace(GOOD, prompt_ids=b"12345"), "prompt of 5 bytes"),
        (replace(GOOD, prompt_ids=b""), "needs a prompt"),
        (replace(GOOD, max_tokens=0), "max_tokens of at least 1"),
        (replace(GOOD, max_tokens=UINT64), "exceed the context of 24 tokens"),
        (replace(GOOD, request_ids=[]), "1 to 1024 different ids, not 0"),
        (replace(GOOD, request_ids=list(range(1025))), "1 to 1024 different ids, not 1025"),
        (replace(GOOD, request_ids=[3, 3]), "1 to 1024 different ids"),
        (replace(GOOD, prompt_logprobs=-2), "prompt_logprobs must be in"),
        (replace(GOOD, prompt_logprobs=21), "prompt_logprobs must be in"),
        (with_sampling(temperature=math.nan), "temperature must be in .* not nan"),
        (with_sampling(temperature=-0.1), "temperature"),
        (with_sampling(temperature=1e39), "temperature"),
        (with_sampling(top_k=-1), "top_k"),
        (with_sampling(top_k=INT32 + 1), "top_k"),
        (with_sampling(top_p=1.5), "top_p"),
        (with_sampling(min_p=math.inf), "min_p"),
        (with_sampling(seed=-1), "seed"),
        (with_sampling(sequence=-1), "sequence"),
        (with_sampling(logprobs=-2), "logprobs"),
        (with_sampling(logprobs=21), "logprobs"),
        (with_rules(allowed_ids=b"123"), "allowed_ids of 3 bytes"),
        (with_rules(bias_ids=pack_ids([1, 2]), bias_values=[1.0]), "1 bias_values do not match"),
        (with_rules(bias_ids=pack_ids([1]), bias_values=[math.inf]), "bias_values must be in"),
        (with_rules(bad_words=[[1], []]), "bad_words is empty"),
        (with_rules(bad_words=[[1, -1]]), "end_ids and bad_words"),
        (with_rules(end_ids=[INT32 + 1]), "end_ids and bad_words"),
        (with_rules(min_tokens=-1), "min_tokens"),
        (with_rules(repetition_penalty=0.0), "repetition_penalty"),
        (with_rules(frequency_penalty=math.nan), "frequency_penalty"),
        (with_rules(presence_penalty=-math.inf), "presence_penalty"),
    ],
)
def test_what_would_harm_a_worker_is_refused(message: AddRequest, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_request(message, MAX_MODEL_LEN)


@pytest.mark.parametrize(
    "message",
    [
        GOOD,
        replace(GOOD, prompt_logprobs=20, priority=-(1 << 63), cache_salt="\0"),
        with_sampling(temperature=0, top_k=INT32, top_p=0.0, min_p=1.0, seed=UINT64, logprobs=20),
        with_rules(
            allowed_ids=pack_ids([1]), bias_ids=pack_ids([1]), bias_values=[-100.0], bad_words=[[1, 2]]
        ),
        with_rules(min_tokens=4, end_ids=[0], repetition_penalty=0.01, frequency_penalty=-2.0),
    ],
)
def test_bounds_are_inside(message: AddRequest) -> None:
    check_request(message, MAX_MODEL_LEN)


WIRE_INT = st.one_of(st.integers(-2, 30), st.integers(-(1 << 63), UINT64))
WIRE_FLOAT = st.one_of(st.floats(0, 1), st.floats())
IDS = st.one_of(st.lists(st.integers(-1, 9), max_size=6).map(pack_ids), st.binary(max_size=9))
INTS = st.lists(WIRE_INT, max_size=3)


def resolved(kind: type[msgspec.Struct], **strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Some fields hostile, the rest at what a decent request has."""
    fields = {name: st.one_of(st.just(...), strategy) for name, strategy in strategies.items()}

    def build(values: dict[str, Any]) -> msgspec.Struct:
        decent = {LogitsProcessors: LogitsProcessors(), type(GREEDY): GREEDY, AddRequest: GOOD}[kind]
        return replace(decent, **{name: value for name, value in values.items() if value is not ...})

    return st.fixed_dictionaries(fields).map(build)


RULES = resolved(
    LogitsProcessors,
    allowed_ids=IDS,
    bad_words=st.lists(INTS, max_size=3),
    min_tokens=WIRE_INT,
    end_ids=INTS,
    bias_ids=IDS,
    bias_values=st.lists(WIRE_FLOAT, max_size=3),
    repetition_penalty=WIRE_FLOAT,
    frequency_penalty=WIRE_FLOAT,
    presence_penalty=WIRE_FLOAT,
)
SAMPLING = resolved(
    type(GREEDY),
    temperature=WIRE_FLOAT,
    top_k=WIRE_INT,
    top_p=WIRE_FLOAT,
    min_p=WIRE_FLOAT,
    seed=WIRE_INT,
    sequence=WIRE_INT,
    logits_processors=st.one_of(st.none(), RULES),
    logprobs=st.integers(-2, 3),
)
REQUESTS = resolved(
    AddRequest,
    request_ids=st.lists(WIRE_INT, min_size=1, max_size=3),
    prompt_ids=IDS,
    max_tokens=WIRE_INT,
    sampling=SAMPLING,
    eos_token_ids=INTS,
    stop_token_ids=INTS,
    priority=WIRE_INT,
    cache_salt=st.text(max_size=3),
    prompt_logprobs=st.integers(-2, 3),
)


def check_columns(message: AddRequest) -> None:
    """Raises unless the values fit the columns of a worker's batch."""
    sampling = message.sampling
    assert struct.pack("<Q", sampling.seed) and struct.pack("<ii", sampling.top_k, sampling.sequence)
    floats = [sampling.temperature, sampling.top_p, sampling.min_p]
    if sampling.logits_processors is not None:
        rules = sampling.logits_processors
        floats += [*rules.bias_values, rules.repetition_penalty, rules.frequency_penalty]
        floats.append(rules.presence_penalty)
        integers = [*rules.end_ids, rules.min_tokens, *chain(*rules.bad_words)]
        assert struct.pack(f"<{len(integers)}i", *integers)
    assert all(math.isfinite(value) for value in floats) and struct.pack(f"<{len(floats)}f", *floats)


def without_seeds(batch: ScheduledBatch) -> ScheduledBatch:
    """To the simulated worker a seed means other KV; here equal tokens are equal."""
    rows = [replace(new, sampling=replace(new.sampling, seed=0)) for new in batch.new_rows]
    return replace(batch, new_rows=rows)


@settings(max_examples=300, deadline=None)
@given(
    messages=st.lists(st.tuples(REQUESTS, st.sampled_from([b"a", b"b"])), max_size=8),
    aborted=INTS,
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_no_request_can_raise(
    messages: list[tuple[AddRequest, bytes]], aborted: list[int], policy: str
) -> None:
    run = CoreDriver([FULL], [8], Limits(3, 5, policy), MAX_MODEL_LEN)
    decoder: Decoder[ToCore] = Decoder(ToCore)
    live: set[int] = set()
    for message, frontend in messages:
        received = decoder.decode(encode(message))
        assert isinstance(received, AddRequest)
        refusal = run.core.add(received, frontend)
        if refusal is None:
            live.update(received.request_ids)
            check_columns(received)
        else:
            assert all(end.reason is FinishReason.ERROR for end in refusal.finished) and encode(refusal)
    run.core.abort(aborted)
    live.difference_update(aborted)
    while (batch := run.core.schedule()) is not None:
        assert encode(batch)
        for delta in run.core.update_from_output(run.worker.execute(without_seeds(batch))).values():
            assert encode(delta)
            live.difference_update(finished.request_id for finished in delta.finished)
        run.core.check_integrity()
    assert not live and run.core.num_live == 0 and run.core.stats().kv_blocks_used == 0


@pytest.fixture
def frontend() -> Iterator[tuple[FrontendLink, "zmq.Socket[bytes]"]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = FrontendLink(context, "inproc://frontends")
    socket = context.socket(zmq.DEALER)
    socket.connect("inproc://frontends")
    yield link, socket
    context.destroy(linger=0)


def test_garbage_is_dropped_and_complained_about_once(
    frontend: tuple[FrontendLink, "zmq.Socket[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, socket = frontend
    complaints: list[str] = []
    monkeypatch.setattr("engine_core.links.get_logger", lambda: Log(complaints))
    frame = encode(GOOD)
    damaged = [frame[:cut] + bytes([byte]) + frame[cut + 1 :] for cut in range(4) for byte in (0, 0xC1, 0xFF)]

    @settings(max_examples=200, deadline=None)
    @given(
        frames=st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(damaged)), min_size=1, max_size=3)
    )
    def feed(frames: list[bytes]) -> None:
        socket.send_multipart(frames)
        socket.send(encode(GetStats()))
        # A call on a slow machine may end before this message: its time is bounded.
        assert any(GetStats() in [message for _, message in link.receive()] for _ in range(100))

    feed()
    assert len(complaints) == 1 and "undecodable frame" in complaints[0]
    socket.send(encode(Abort([1])))
    assert [message for _, message in link.receive()] == [Abort([1])]


class Log:
    """Keeps errors instead of writing them."""

    def __init__(self, lines: list[str]):
        self._lines = lines

    def error(self, text: str, *arguments: object) -> None:
        self._lines.append(text % arguments)
