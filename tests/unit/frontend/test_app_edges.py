"""API keys, overload, metrics, engine failure and tokenization, over HTTP."""

import contextlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from frontend.http.limits import HttpLimits
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, Client, running_frontend
from tests.helpers.servers.wire import error_of, metric, post_head, raw_response

TOKENIZER = tiny_tokenizer.tokenizer()
KEYS = ServerConfig(api_key="first-key,second-key")


def script_by_prompt(request: AddRequest) -> Script:
    text = TOKENIZER.decode(unpack_ids(request.prompt_ids))
    if "silence" in text:
        return Script([], reason=None)
    return Script([5, 6, 7], FinishReason.MAX_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("checkpoint"), max_model_len=200_000)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCore]:
    with FakeCore(tmp_path_factory.mktemp("core"), script_by_prompt, max_model_len=200_000) as core:
        yield core


@pytest.fixture(scope="module")
def client(core: FakeCore, checkpoint: Checkpoint) -> Iterator[Client]:
    with running_frontend(core, checkpoint) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Iterator[Client]:
    with (
        FakeCore(tmp_path_factory.mktemp("guarded"), script_by_prompt) as core,
        running_frontend(core, checkpoint, KEYS) as client,
    ):
        yield client


# Keys


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/org/tiny"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/server_info"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/no/such/route"),
    ("DELETE", "/v1/completions"),
    ("GET", "//health"),
    ("GET", "/health/"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_requires_a_key(guarded: Client, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "first-key,second-key"}):
        status, data, received = guarded.exchange(method, path, headers=headers)
        assert (status, received["www-authenticate"]) == (401, "Bearer")
        error = error_of(data)
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert "first-key" not in data.decode()
    for headers in ({"Authorization": "Bearer first-key"}, {"x-api-key": "second-key"}):
        assert guarded.exchange(method, path, {}, headers=headers)[0] != 401


def test_health_probes_need_no_key(guarded: Client) -> None:
    assert guarded.exchange("GET", "/health")[0] == 200
    assert guarded.exchange("GET", "/ready")[0] == 200


def test_an_unauthorized_request_is_refused_before_its_body_is_read(guarded: Client) -> None:
    status, _, _ = raw_response(guarded, post_head(1 << 30))
    assert status == 401


def test_server_info_shows_no_keys(guarded: Client) -> None:
    status, data, _ = guarded.exchange("GET", "/server_info", headers={"x-api-key": "first-key"})
    info = json.loads(data)
    assert status == 200
    assert info["server"]["api_key"] is True
    assert "first-key" not in data.decode()
    assert info["engine"]["kv_tokens"] == 100_000
    assert info["config"]["scheduler"]["scheduling_policy"] == "priority"


def test_callers_of_different_keys_share_no_cached_prompts(tmp_path: Path, checkpoint: Checkpoint) -> None:
    def salts(core: FakeCore, server: ServerConfig, keys: list[str]) -> list[str]:
        core.requests.clear()
        with running_frontend(core, checkpoint, server) as client:
            for key in keys:
                headers = {"Authorization": f"Bearer {key}"}
                assert client.exchange("POST", "/v1/completions", {"prompt": "x"}, headers=headers)[0] == 200
        return [request.cache_salt for request in core.requests]

    with FakeCore(tmp_path, script_by_prompt) as core:
        first, second, again = salts(core, KEYS, ["first-key", "second-key", "first-key"])
        assert first and second and first != second and first == again
        assert salts(core, ServerConfig(api_key="only"), ["only"]) == [""]


# Request ids


def test_every_response_has_a_request_id(client: Client) -> None:
    body = {"prompt": "x"}
    for method, path, payload in (
        ("GET", "/health", None),
        ("GET", "/nothing", None),
        ("POST", "/v1/completions", {"nonsense": 1}),
        ("POST", "/v1/completions", body),
        ("POST", "/v1/completions", {**body, "stream": True}),
    ):
        _, _, headers = client.exchange(method, path, payload, headers={"X-Request-Id": "my.id:7_b-2"})
        assert headers["x-request-id"] == "my.id:7_b-2"
        _, _, headers = client.exchange(method, path, payload)
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])


def test_the_request_id_header_becomes_part_of_the_response_id(client: Client) -> None:
    _, data, _ = client.exchange("POST", "/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "mine"})
    assert json.loads(data)["id"] == "cmpl-mine"


@pytest.mark.parametrize("name", ["", " ", "a b", "ä", "x" * 129, "-x", 'a"b', "a\tb"])
def test_invalid_request_ids_are_replaced(client: Client, name: str) -> None:
    _, _, headers = client.exchange("GET", "/health", headers={"X-Request-Id": name})
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])


# Overload


def test_requests_above_the_capacity_are_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with (
        FakeCore(tmp_path, script_by_prompt) as core,
        running_frontend(core, checkpoint, ServerConfig(max_queued_requests=7)) as client,
        contextlib.ExitStack() as stack,
    ):
        inside = []
        for _ in range(8):
            connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=DEADLINE_S)
            stack.callback(connection.close)
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "silence"}))
            inside.append(connection)
        core.wait_for(lambda: len(core.requests) == 8)
        for _ in range(72):
            status, data, headers = client.exchange("POST", "/v1/completions", {"prompt": "x"})
            assert status == 429
            assert 1 <= int(headers["retry-after"]) <= 60
            error = error_of(data)
            assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert len(core.requests) == 8
        assert metric(client, "atom:requests_refused_total") == 72
        assert metric(client, "atom:http_responses_total") >= 72
        assert len(core.requests) == 8
        assert not core.aborted
        inside.pop().close()
        core.wait_for(lambda: core.aborted)
        core.wait_for(lambda: client.exchange("POST", "/v1/completions", {"prompt": "x"})[0] == 200)


def test_a_full_server_reads_no_bodies(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with (
        FakeCore(tmp_path, script_by_prompt) as core,
        running_frontend(core, checkpoint, ServerConfig(max_queued_requests=0)) as client,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", client.port)) as connection,
    ):
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "silence"}))
        core.wait_for(lambda: core.requests)
        assert raw_response(client, post_head(1000))[0] == 429


def test_each_choice_counts_against_the_capacity(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with (
        FakeCore(tmp_path, script_by_prompt) as core,
        running_frontend(core, checkpoint, ServerConfig(max_queued_requests=3)) as client,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", client.port)) as connection,
    ):
        status, response = client.post("/v1/completions", prompt="x", n=5)
        assert (status, "4 at most" in response["error"]["message"]) == (400, True)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "silence", "n": 2}))
        core.wait_for(lambda: len(core.requests) == 2)
        assert client.post("/v1/completions", prompt="x", n=3)[0] == 429
        assert client.post("/v1/completions", prompt="x", n=2, stream=True, model="org/other")[0] == 404
        assert client.post("/v1/completions", prompt="x", n=2)[0] == 200
        status, data, _ = client.exchange("POST", "/v1/completions", {"prompt": "x", "n": 3, "stream": True})
        assert (status, error_of(data)["code"]) == (429, "rate_limit_exceeded")


# Metrics and engine failure


def test_request_metrics(client: Client, core: FakeCore) -> None:
    before = {
        name: metric(client, name)
        for name in ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count")
    }
    assert client.post("/v1/completions", prompt="x", n=2)[0] == 200
    assert metric(client, "vllm:generation_tokens_total") == before["vllm:generation_tokens_total"] + 6
    assert (
        metric(client, "vllm:time_to_first_token_seconds_count")
        == before["vllm:time_to_first_token_seconds_count"] + 2
    )
    assert metric(client, "atom:choices_live") == 0


def test_metrics_count_disconnects(client: Client, core: FakeCore) -> None:
    before = metric(client, "atom:client_disconnects_total")
    core.requests.clear()
    body = b'{"prompt": "silence"}'
    with socket.create_connection(("127.0.0.1", client.port), DEADLINE_S) as connection:
        connection.sendall(post_head(len(body)) + body)
        core.wait_for(lambda: core.requests)
        assert metric(client, "atom:choices_live") == 1
    core.wait_for(lambda: metric(client, "atom:client_disconnects_total") == before + 1)
    assert metric(client, "atom:choices_live") == 0


def test_engine_failure(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with (
        FakeCore(tmp_path, script_by_prompt) as core,
        running_frontend(core, checkpoint, max_replays=0) as client,
    ):
        assert metric(client, "atom:engine_up") == 1
        streaming = http.client.HTTPConnection("127.0.0.1", client.port, timeout=DEADLINE_S)
        with contextlib.closing(streaming):
            streaming.request("POST", "/v1/completions", json.dumps({"prompt": "silence", "stream": True}))
            core.wait_for(lambda: core.requests)
            core.die("worker 0 was killed")
            response = streaming.getresponse()
            frames = response.read().decode().strip().split("\n\n")
        assert json.loads(frames[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert frames[-1] == "data: [DONE]"
        status, data, headers = client.exchange("POST", "/v1/completions", {"prompt": "x"})
        assert (status, headers["retry-after"]) == (503, "2")
        assert error_of(data)["code"] == "engine_dead"
        assert metric(client, "atom:engine_up") == 0
        assert client.call("GET", "/health")[0] == 200
        assert client.exchange("GET", "/ready")[0] == 503


def test_waiting_clients_get_an_error_when_the_core_disappears(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    core = FakeCore(tmp_path, script_by_prompt)
    with running_frontend(core, checkpoint, wait=False, max_replays=0) as client:
        responses: list[tuple[int, Any]] = []
        with core:
            core.wait_for(lambda: client.exchange("GET", "/ready")[0] == 200)
            waiting = [
                threading.Thread(
                    target=lambda: responses.append(client.post("/v1/completions", prompt="silence"))
                )
                for _ in range(4)
            ]
            for thread in waiting:
                thread.start()
            core.wait_for(lambda: len(core.requests) == 4)
        for thread in waiting:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in waiting)
    assert [(status, response["error"]["code"]) for status, response in responses] == [
        (500, "engine_dead")
    ] * 4


# Tokenization


def test_tokenize_and_detokenize(client: Client) -> None:
    status, response = client.post("/tokenize", prompt="Hello 你好")
    ids = TOKENIZER.encode("Hello 你好")
    assert status == 200
    assert response == {"count": len(ids), "max_model_len": 200_000, "tokens": ids, "token_strs": None}
    assert client.post("/detokenize", tokens=ids) == (200, {"prompt": "Hello 你好"})
    assert client.post("/detokenize", tokens=[0, *ids, 1])[1] == {"prompt": "<s>Hello 你好</s>"}
    assert client.post("/detokenize", tokens=[]) == (200, {"prompt": ""})


def test_tokenize_a_conversation(client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _, response = client.post("/tokenize", messages=messages, return_token_strs=True)
    assert "".join(response["token_strs"]) == "[user]hi[assistant]"
    _, response = client.post("/tokenize", messages=messages, add_generation_prompt=False)
    assert TOKENIZER.decode(response["tokens"]) == "[user]hi"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "frobnicate": 1}, "frobnicate"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, None),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_refused_tokenizations(client: Client, path: str, body: dict[str, Any], param: str | None) -> None:
    status, response = client.post(path, **body)
    assert status == 400
    assert param is None or response["error"]["param"] == param


def test_limits_are_as_documented() -> None:
    assert replace(HttpLimits()) == HttpLimits(
        8 << 20, 256 << 20, None, 8190, 128, 60.0, 20.0, 75.0, 620.0, 120.0, 15.0, 1.0
    )
