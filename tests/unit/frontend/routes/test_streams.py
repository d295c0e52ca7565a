"""Streams that are resumed: at the same frontend, at another one, by clients that have their key."""

import http.client
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from atom.shared.config.server import ServerConfig
from tests.helpers.servers.http_server import MODEL, Client
from tests.helpers.servers.resuming import without_times
from tests.helpers.servers.tool_model import USER, WEATHER, ToolModel, running_model, running_server

CHAT = "/v1/chat/completions"
TOOLS: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": [WEATHER], "stream": True}
RESUMABLE = {"X-Resumable-Stream": "true"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**TOOLS, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (CHAT, {**TOOLS, "n": 3, "return_token_ids": True}),
    (CHAT, {**TOOLS, "stop": ["Looking"]}),
    ("/v1/completions", {"model": MODEL, "stream": True, "prompt": ["a", "b"], "n": 2, "echo": True}),
    (
        "/v1/responses",
        {
            "model": MODEL,
            "stream": True,
            "input": [USER],
            "tools": [{"type": "function", **WEATHER["function"]}],
        },
    ),
    (
        "/v1/messages",
        {
            "model": MODEL,
            "stream": True,
            "max_tokens": 500,
            "messages": [USER],
            "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
        },
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolModel]:
    with running_model(tmp_path_factory.mktemp("streams")) as model:
        yield model


@pytest.fixture(scope="module")
def frontends(model: ToolModel) -> Iterator[list[Client]]:
    keys = ServerConfig(api_key="one,two")
    with running_server(model, keys) as first, running_server(model, keys, index=1) as second:
        yield [first, second]


def events_of(data: bytes) -> list[tuple[str, str]]:
    """(id, data without times) of each event."""
    found = []
    for frame in data.decode().split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in frame.splitlines() if not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("id", ""), without_times(fields["data"])))
    return found


def key_headers(key: str = "one", **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


def begun(client: Client, path: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    """All events of a resumable stream."""
    status, data, headers = client.exchange("POST", path, body, headers={**key_headers(), **RESUMABLE})
    assert status == 200, data
    events = events_of(data)
    assert all(event_id.startswith(headers["x-stream-id"] + "/") for event_id, _ in events)
    return events


def rest(client: Client, event_id: str, key: str = "one") -> tuple[int, bytes]:
    path = f"/v1/streams/{event_id.partition('/')[0]}"
    status, data, _ = client.exchange("GET", path, headers=key_headers(key) | {"Last-Event-ID": event_id})
    return status, data


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_rest_of_a_stream_is_the_same_after_each_event(
    frontends: list[Client], path: str, body: dict[str, Any]
) -> None:
    """At another frontend, which renders it from the ids."""
    events = begun(frontends[0], path, body)
    assert len(events) > 3
    several = body.get("n", 1) > 1
    for place in range(0, len(events) - 1, max(len(events) // 8, 1)):
        status, data = rest(frontends[1], events[place][0])
        assert status == 200, data
        got = events_of(data)
        if several:  # their order depends on the steps
            assert sorted(text for _, text in got) == sorted(text for _, text in events[place + 1 :])
        else:
            assert got == events[place + 1 :]


def test_a_stream_of_several_choices_breaks_again_and_again(frontends: list[Client]) -> None:
    """Each event's id counts all that the client has, also of choices that are sent again after it."""
    path, body = BODIES[1]
    events = begun(frontends[0], path, body)
    got = events[: len(events) // 2]
    for times in range(6):
        status, data = rest(frontends[times % 2], got[-1][0])
        assert status == 200, data
        got.append(events_of(data)[0])
    got += events_of(rest(frontends[0], got[-1][0])[1])
    assert sorted(text for _, text in got) == sorted(text for _, text in events)


def test_the_events_of_a_plain_stream_have_no_ids(frontends: list[Client]) -> None:
    status, data, headers = frontends[0].exchange("POST", CHAT, TOOLS, headers=key_headers())
    assert status == 200 and b"\nid: " not in data and "x-stream-id" not in headers
    plain = [json.loads(text) for _, text in events_of(data) if text != "[DONE]"]
    resumable = [json.loads(text) for _, text in begun(frontends[0], CHAT, TOOLS) if text != "[DONE]"]
    assert joined(plain) == joined(resumable)


def joined(chunks: list[Any]) -> list[str]:
    """Content, reasoning and the arguments of each call."""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    texts = ["".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")]
    return texts + [
        "".join(call["function"]["arguments"] for call in calls if call["index"] == index) for index in (0, 1)
    ]


def test_a_disconnected_client_resumes_at_any_frontend(model: ToolModel, frontends: list[Client]) -> None:
    expected = begun(frontends[0], CHAT, TOOLS)
    for frontend in (*frontends, frontends[0]):
        core = model.core
        paused = [False]
        core.waits = lambda paused=paused: paused[0]  # type: ignore[misc]
        connection = frontends[0].connection()
        connection.request("POST", CHAT, json.dumps(TOOLS), {**key_headers(), **RESUMABLE})
        response = connection.getresponse()
        got = read_events(response, 4)
        paused[0] = True
        response.close()
        connection.close()
        aborted = len(core.aborted)
        paused[0] = False
        status, data = rest(frontend, got[-1][0])
        assert status == 200, data
        assert [text for _, text in got + events_of(data)] == [text for _, text in expected]
        assert len(core.aborted) == aborted


def read_events(response: http.client.HTTPResponse, count: int) -> list[tuple[str, str]]:
    data = b""
    while data.count(b"\n\n") < count:
        data += response.readline()
    return events_of(data)


def test_a_stream_belongs_to_its_api_key(frontends: list[Client]) -> None:
    events = begun(frontends[0], CHAT, TOOLS)
    for frontend in frontends:
        status, data = rest(frontend, events[0][0], "two")
        assert status == 404 and b"stream_not_found" in data


@pytest.mark.parametrize("last", ["x/1", "{key}/", "{key}/x", "{key}/1.2", "{key}/-1", "{key}/9999999999"])
def test_another_streams_position_is_refused_and_the_stream_stays(frontends: list[Client], last: str) -> None:
    events = begun(frontends[0], CHAT, TOOLS)
    key = events[0][0].partition("/")[0]
    headers = key_headers() | {"Last-Event-ID": last.format(key=key)}
    status, data, _ = frontends[1].exchange("GET", f"/v1/streams/{key}", headers=headers)
    assert status == 400 and b"Last-Event-ID" in data
    assert events_of(rest(frontends[1], events[2][0])[1]) == events[3:]


def test_a_position_after_the_end_is_an_error_event(frontends: list[Client]) -> None:
    events = begun(frontends[0], CHAT, TOOLS)
    status, data = rest(frontends[1], events[0][0].partition("/")[0] + "/9999")
    assert status == 200 and b"before the one that was asked for" in data


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"stream": False}, "needs 'stream': true"),
        (CHAT, {"logprobs": True}, "cannot be combined with log probabilities"),
        (CHAT, {"n": 17}, "takes at most 16 sequences"),
        ("/v1/completions", {"logprobs": 2}, "cannot be combined with log probabilities"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    frontends: list[Client], path: str, fields: dict[str, Any], message: str
) -> None:
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": "a"}
    body = {"model": MODEL, "stream": True, **prompt, **fields}
    status, data, _ = frontends[0].exchange("POST", path, body, headers={**key_headers(), **RESUMABLE})
    assert status == 400 and message.encode() in data
    headers = key_headers() | {"X-Resumable-Stream": "yes"}
    status, data, _ = frontends[0].exchange("POST", path, body, headers=headers)
    assert status == 400 and b"must be 'true' or 'false'" in data


def test_a_response_is_streamed_again_after_a_sequence_number(frontends: list[Client]) -> None:
    path, body = BODIES[4]
    events = begun(frontends[0], path, body)
    response_id = events[0][0].partition("/")[0]
    assert response_id.startswith("resp_")
    for after in (0, 7, len(events) - 2):
        target = f"{path}/{response_id}?stream=true&starting_after={after}"
        status, data, _ = frontends[1].exchange("GET", target, headers=key_headers())
        assert status == 200, data
        assert events_of(data) == events[after + 1 :]
    target = f"{path}/{response_id}?stream=true&starting_after=x"
    assert frontends[1].exchange("GET", target, headers=key_headers())[0] == 400


def test_the_same_body_goes_on_after_the_last_event(frontends: list[Client]) -> None:
    events = begun(frontends[0], CHAT, TOOLS)
    headers = {**key_headers(), **RESUMABLE, "Last-Event-ID": events[4][0]}
    status, data, _ = frontends[1].exchange("POST", CHAT, TOOLS, headers=headers)
    assert status == 200 and events_of(data) == events[5:]
    status, data, _ = frontends[1].exchange("POST", CHAT, {**TOOLS, "n": 2}, headers=headers)
    assert status == 400 and b"a stream of another request" in data
    status, data, _ = frontends[1].exchange("POST", "/v1/completions", TOOLS, headers=headers)
    assert status == 400 and b"a stream of another request" in data


def test_who_asks_last_has_the_stream(model: ToolModel, frontends: list[Client]) -> None:
    """The earlier connection may be open still, as after a loss of the network."""
    expected = begun(frontends[0], CHAT, TOOLS)
    for frontend in frontends:
        last = [model.core.steps + 8]  # of some forty
        model.core.waits = lambda last=last: model.core.steps >= last[0]  # type: ignore[misc]
        connection = frontends[0].connection()
        connection.request("POST", CHAT, json.dumps(TOOLS), {**key_headers(), **RESUMABLE})
        response = connection.getresponse()
        got = read_events(response, 4)
        other = frontend.connection()
        path = f"/v1/streams/{got[-1][0].partition('/')[0]}"
        other.request("GET", path, headers={**key_headers(), "Last-Event-ID": got[-1][0]})
        resumed = other.getresponse()
        assert resumed.status == 200
        assert b"resumed" in response.read()  # its error event, and its end
        last[0] = sys.maxsize
        assert [text for _, text in got + events_of(resumed.read())] == [text for _, text in expected]
        connection.close()
        other.close()
