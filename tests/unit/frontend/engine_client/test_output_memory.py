"""Output that waits is bounded, for each request and in all; the requests that end say why."""

import asyncio
import contextlib
import json
import socket
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from frontend.engine_client.output_memory import HeldOutput, OutputMemory, default_output_memory
from frontend.engine_client.streams import Stream, StreamOptions
from frontend.errors import ApiError
from frontend.http.limits import HttpLimits
from frontend.text.output_processor import SequenceOutput
from frontend.text.text_executor import TextExecutor
from frontend.text.token_logprobs import LogprobColumns, LogprobTrack, PackedLogprobs
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script, table
from tests.helpers.servers.http_server import DEADLINE_S, Client, running_frontend
from tests.helpers.servers.wire import metric, post_head

TOKENIZER = tiny_tokenizer.tokenizer()
LIMIT = 8 << 20
LENGTH = 30_000
PER_STEP = 50


def script(request: AddRequest) -> Script:
    text = TOKENIZER.decode(unpack_ids(request.prompt_ids))
    if "flood" in text:
        return Script([5] * request.max_tokens, FinishReason.MAX_TOKENS, per_step=PER_STEP)
    return Script([5, 6, 7], FinishReason.MAX_TOKENS)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCore]:
    with FakeCore(tmp_path_factory.mktemp("core"), script, max_model_len=200_000) as core:
        yield core


@pytest.fixture(scope="module")
def client(core: FakeCore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("checkpoint"), max_model_len=200_000)
    limits = HttpLimits(max_output_memory=LIMIT)
    with running_frontend(core, checkpoint, limits=limits, send_buffer=4096) as client:
        yield client


def ended(client: Client) -> float:
    return metric(client, "atom:requests_output_limited_total")


def test_a_response_above_its_limit_is_a_400_and_is_aborted(client: Client, core: FakeCore) -> None:
    core.requests.clear()
    before = ended(client)
    status, response = client.post(
        "/v1/completions", prompt="flood", max_tokens=LENGTH, n=2, logprobs=5, return_token_ids=True
    )
    assert (status, response["error"]["code"]) == (400, "response_too_large")
    assert "'stream': true" in response["error"]["message"]
    core.wait_for(lambda: {each.request_ids[0] for each in core.requests} <= set(core.aborted))
    assert ended(client) == before + 1
    assert client.post("/v1/completions", prompt="x")[0] == 200
    assert metric(client, "atom:choices_live") == 0


def test_a_response_below_its_limit_is_complete(client: Client) -> None:
    status, response = client.post("/v1/completions", prompt="flood", max_tokens=LENGTH)
    assert (status, response["usage"]["completion_tokens"]) == (200, LENGTH)
    assert response["choices"][0]["text"] == TOKENIZER.decode([5] * LENGTH)


@pytest.mark.parametrize(
    ("stream", "fields", "param"),
    [
        (False, {"echo": True}, "echo"),
        (False, {"return_token_ids": True}, "return_token_ids"),
        (True, {"echo": True, "return_token_ids": True}, "echo"),
    ],
)
def test_prompts_that_a_response_cannot_show_are_refused_before_any_work(
    client: Client, core: FakeCore, stream: bool, fields: dict[str, bool], param: str
) -> None:
    """128 choices with 100 kB each; the limit is named."""
    core.requests.clear()
    body = {"prompt": "x " * 50_000, "n": 128, "max_tokens": 1, "stream": stream, **fields}
    status, response = client.post("/v1/completions", **body)
    error = response["error"]
    assert (status, error["code"], error["param"]) == (400, "response_too_large", param)
    assert f"at most {LIMIT // (8 if stream else 2)} are possible" in error["message"]
    assert not core.requests
    assert client.post("/v1/completions", **(body | {"n": 2, "stream": False}))[0] == 200


def test_shown_prompts_are_encoded_in_a_thread_and_counted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a response that finds no room get 429."""
    run, reserved = TextExecutor.run, OutputMemory.reserved
    memories, sizes = list[OutputMemory](), list[int]()

    def reserving(memory: OutputMemory, size: int) -> contextlib.AbstractContextManager[None]:
        memories.append(memory)
        return reserved(memory, size)

    async def running(executor: TextExecutor, size: int, work: Callable[[], Any]) -> Any:
        sizes.append(size)
        if size > 1_000_000:
            assert memories[-1].used > 1_600_000
        return await run(executor, size, work)

    monkeypatch.setattr(TextExecutor, "run", running)
    monkeypatch.setattr(OutputMemory, "reserved", reserving)
    body = {"prompt": "x " * 50_000, "n": 16, "max_tokens": 1, "echo": True}
    status, response = client.post("/v1/completions", **body)
    assert (status, len(response["choices"])) == (200, 16)
    assert max(sizes) > 1_600_000
    memory = memories[-1]
    monkeypatch.setattr(memory, "limit", 1_000_000)
    status, response = client.post("/v1/completions", **body)
    assert status == 429 and "try again later" in response["error"]["message"]
    assert memory.used == 0


def test_a_stream_that_is_not_read_ends_with_an_error_event(client: Client, core: FakeCore) -> None:
    core.requests.clear()
    before = ended(client)
    body: dict[str, Any] = {"prompt": "flood", "stream": True, "max_tokens": LENGTH, "n": 2, "logprobs": 5}
    data = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(DEADLINE_S)
        connection.connect(("127.0.0.1", client.port))
        connection.sendall(post_head(len(data)) + data)
        # Long before the deadline for writing, and while the client still does not read:
        core.wait_for(
            lambda: core.requests and {r.request_ids[0] for r in core.requests} <= set(core.aborted)
        )
        assert ended(client) == before + 1
        assert client.post("/v1/completions", prompt="x")[0] == 200
        received = b""
        while b"[DONE]" not in received[-100:]:
            received += connection.recv(1 << 20)
    assert b'"code":"client_too_slow"' in received[-1000:]


def test_a_stream_that_is_read_is_never_ended(
    client: Client, core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client never lags by more than four steps; in all it gets several times what may wait."""
    before, begun, received, length = ended(client), core.steps, 0, LENGTH // 5
    monkeypatch.setattr(core, "waits", lambda: core.steps - begun > 4 + received // (2 * PER_STEP))
    body = {"prompt": "flood", "stream": True, "max_tokens": length, "n": 2, "logprobs": 5}
    with contextlib.closing(client.connection()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                found = json.loads(line[6:])["choices"][0]["logprobs"]
                received += len(found["tokens"]) if found else 0
    assert received == 2 * length
    assert ended(client) == before


def stream(memory: OutputMemory, ids: list[int], limit: int = 1 << 40, **options: Any) -> Stream:
    made = Stream(ids, StreamOptions(**options), HeldOutput(memory, limit, lambda error: made.end(error)))
    return made


def update(request_id: int, text: str = "abc", **fields: Any) -> SequenceOutput:
    return SequenceOutput(request_id, array("i", [5]), text, **fields)


def read(stream: Stream) -> list[SequenceOutput]:
    async def run() -> list[SequenceOutput]:
        return await asyncio.wait_for(anext(stream), DEADLINE_S)

    return asyncio.run(run())


def test_a_stream_that_is_read_holds_nothing() -> None:
    memory = OutputMemory(1)
    one = stream(memory, [1, 2], logprobs=20)
    for _ in range(5):
        one.put(update(1), 1.0)
        one.put(update(2), 1.0)
        assert len(read(one)) == 2
        assert (memory.used, memory.is_exceeded) == (0, False)


def test_what_waits_is_counted_until_it_is_sent() -> None:
    memory = OutputMemory(1 << 30)
    one = stream(memory, [1])
    for text in ("He", "llo ", "你", "🦊", "\udc80"):
        one.put(update(1, text, reasoning=text.upper()), 1.0)
    waiting = memory.used
    assert waiting > 0
    (joined,) = read(one)
    assert (joined.text, joined.reasoning) == ("Hello 你🦊\udc80", "HELLO 你🦊\udc80")
    assert len(joined.token_ids) == 5
    assert memory.used == waiting  # the frames are being sent
    for _ in range(3):  # while the client reads the frames
        one.put(update(1), 1.0)
    assert memory.used > waiting
    assert len(read(one)[0].token_ids) == 3
    assert 0 < memory.used < waiting
    one.put(update(1), 1.0)
    read(one)
    assert memory.used == 0
    one.put(update(1), 1.0)
    one.put(update(1), 1.0)
    one.output.close()
    assert memory.used == 0


def test_at_the_total_the_largest_ends_and_no_other() -> None:
    memory = OutputMemory(5000)
    streams = [stream(memory, [number]) for number in range(3)]
    for number, tokens in enumerate((50, 150, 60)):
        for _ in range(tokens):
            streams[number].put(update(number), 1.0)
    while not memory.is_exceeded:
        streams[0].put(update(0), 1.0)
    memory.enforce()
    assert [one.failed for one in streams] == [False, True, False]
    assert not memory.is_exceeded
    with pytest.raises(ApiError) as caught:
        read(streams[1])
    assert (caught.value.status, caught.value.retry_after_s is not None) == (429, True)
    assert len(read(streams[2])[0].token_ids) == 60


def test_output_that_is_being_sent_ends_no_stream_without_output() -> None:
    memory = OutputMemory(100)
    one = stream(memory, [1])
    with memory.sending(1000):
        assert memory.is_exceeded
        memory.enforce()
        assert not one.failed
    assert memory.used == 0


def test_an_error_comes_after_the_end_of_all_sequences_too() -> None:
    memory = OutputMemory(1 << 30)
    one = stream(memory, [1], limit=10)
    one.put(update(1), 1.0)
    one.put(update(1, finished=True, reason="eos"), 1.0)
    memory.enforce()
    with pytest.raises(ApiError):
        read(one)


@pytest.mark.parametrize(("top", "most"), [(0, 40), (20, 240)])
def test_log_probabilities_are_packed(top: int, most: int) -> None:
    columns = LogprobColumns(table([5] * 100, 20))
    whole = PackedLogprobs(1 + top)
    tracemalloc.start()
    try:
        for _ in range(50):
            track = LogprobTrack(top)
            for row in range(100):
                track.add((columns, row), 1)
            released = track.release(100)
            assert isinstance(released, PackedLogprobs)
            whole.extend(released)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / len(whole) < most
    assert list(whole)[-1] == whole[-1] == whole[4999]
    assert whole[1:3] == list(whole)[1:3]
    assert (whole[7].offset, len(whole[7].top)) == (7, top)


def test_tokens_without_text_do_not_wait_forever() -> None:
    columns, track = LogprobColumns(table([5], 0)), LogprobTrack(0)
    released = 0
    for _ in range(10_000):
        track.add((columns, 0), 0)
        released += len(track.release(0))
    assert released == 10_000 - 256
    assert len(track.finish()) == 256


def test_updates_that_wait_are_joined_in_linear_time() -> None:
    def seconds(count: int) -> float:
        one = stream(OutputMemory(1 << 40), [1], every_step=False)
        updates = [update(1, "hello ") for _ in range(count)]
        started = time.process_time()
        for each in updates:
            one.put(each, 1.0)
        return time.process_time() - started

    def per_token(measure: Callable[[], float], count: int) -> float:
        return min(measure() for _ in range(3)) / count

    # Copying all text at each step takes 6 times as long for each of 100,000 tokens as of 10,000.
    assert per_token(lambda: seconds(100_000), 100_000) < 3 * per_token(lambda: seconds(10_000), 10_000)


def test_the_default_is_a_share_of_the_memory() -> None:
    assert default_output_memory(4) * 4 == pytest.approx(default_output_memory(1), rel=1e-6)
    # The longest response with the most log probabilities, sent in one piece, fits on a small host.
    assert default_output_memory(1) // 2 > 163_840 * 21 * 80 or default_output_memory(1) < 1 << 30
