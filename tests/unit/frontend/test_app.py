"""The real app over loopback HTTP, in front of a core that speaks the real messages."""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, MODEL, Client, running_frontend

TOKENIZER = tiny_tokenizer.tokenizer()
EOS = 1
OUTPUT = "Hello 你好 🦊, stop here."
USER = [{"role": "user", "content": "hi"}]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def script_by_prompt(request: AddRequest) -> Script:
    """The script that the prompt names; by default OUTPUT."""
    text = TOKENIZER.decode(unpack_ids(request.prompt_ids))
    if "forever" in text:
        return Script(encode("word " * 5000), reason=None)
    if "silence" in text:
        return Script([], reason=None)
    if "error" in text:
        return Script(encode("so far "), FinishReason.ERROR, message="out of luck")
    if "limit" in text:
        return Script(encode(OUTPUT)[: request.max_tokens], FinishReason.MAX_TOKENS)
    return Script([*encode(OUTPUT), EOS], FinishReason.EOS, EOS, cached=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCore]:
    with FakeCore(tmp_path_factory.mktemp("core"), script_by_prompt) as core:
        yield core


@pytest.fixture(scope="module")
def client(core: FakeCore, checkpoint: Checkpoint) -> Iterator[Client]:
    with running_frontend(core, checkpoint) as client:
        yield client


def shape(events: list[Any]) -> list[Any]:
    """Events without what varies between runs."""
    varying = ("id", "created", "system_fingerprint")
    return [{key: value for key, value in event.items() if key not in varying} for event in events]


def test_a_completion(client: Client) -> None:
    status, response = client.post("/v1/completions", prompt="tell", model=MODEL)
    assert status == 200
    assert list(response) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert re.fullmatch("fp_[0-9a-f]{12}", response["system_fingerprint"])
    assert re.fullmatch("cmpl-[0-9a-f]{32}", response["id"])
    assert (response["object"], response["model"]) == ("text_completion", MODEL)
    assert response["choices"] == [
        {
            "index": 0,
            "text": OUTPUT,
            "finish_reason": "stop",
            "raw_finish_reason": "eos",
            "stop_reason": None,
            "logprobs": None,
        }
    ]


def test_usage(client: Client) -> None:
    _, response = client.post("/v1/completions", prompt="tell", n=2)
    usage = response["usage"]
    prompt, tokens = len(encode("tell")), 2 * (len(encode(OUTPUT)) + 1)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, tokens)
    assert usage["total_tokens"] == prompt + tokens
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert 0 < usage["ttft_s"] < usage["latency_s"] < DEADLINE_S
    assert 0 < usage["tpot_s"] < usage["latency_s"]


def test_a_chat_reply(client: Client, core: FakeCore) -> None:
    status, response = client.post("/v1/chat/completions", messages=USER)
    assert status == 200
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", response["id"])
    assert response["object"] == "chat.completion"
    (choice,) = response["choices"]
    assert choice["message"] == {"role": "assistant", "content": OUTPUT}
    prompt = TOKENIZER.decode(unpack_ids(core.requests[-1].prompt_ids))
    assert prompt == "[user]hi[assistant]"


def test_prompt_is_another_name_of_messages(client: Client) -> None:
    status, response = client.post("/v1/chat/completions", prompt=USER)
    assert (status, response["choices"][0]["message"]["content"]) == (200, OUTPUT)
    status, _ = client.post("/v1/chat/completions", prompt=USER, messages=USER)
    assert status == 400


def test_text_parts_are_joined(client: Client, core: FakeCore) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    assert client.post("/v1/chat/completions", messages=messages)[0] == 200
    prompt = TOKENIZER.decode(unpack_ids(core.requests[-1].prompt_ids))
    assert prompt == "[system]x[user]a\nb[assistant]"  # the template does not know developers


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("ab", 1), (["ab"], 1), (["ab", "cd", "ef"], 3), ([5, 6], 1), ([[5], [6, 7]], 2)],
)
def test_forms_of_prompts(client: Client, core: FakeCore, prompt: Any, count: int) -> None:
    core.requests.clear()
    status, response = client.post("/v1/completions", prompt=prompt, n=2)
    assert status == 200
    assert [choice["index"] for choice in response["choices"]] == list(range(2 * count))
    assert [request.sampling.sequence for request in core.requests] == [0, 1] * count
    assert response["usage"]["prompt_tokens"] == sum(len(r.prompt_ids) // 4 for r in core.requests[::2])


def test_a_chat_stream_is_these_events(client: Client) -> None:
    events = client.events("/v1/chat/completions", messages=USER, stop="lo")
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", events[0]["id"])
    assert len({(event["id"], event["created"]) for event in events}) == 1

    def chunk(delta: dict[str, str], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return {"object": "chat.completion.chunk", "model": MODEL, "choices": [choice]}

    assert shape(events) == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "He"}),
        chunk({"content": "l"}, "stop", stop_reason="lo", raw_finish_reason="stop_sequence"),
    ]


def test_the_bytes_of_a_completion_stream(client: Client) -> None:
    body = {"prompt": "limit", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    status, data, headers = client.exchange("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    start = json.loads(data.split(b"\n")[0].removeprefix(b"data: "))
    usage = json.loads(data.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
    head = (
        f'data: {{"id":"{start["id"]}","object":"text_completion",'
        f'"created":{start["created"]},"model":"org/tiny",'
        f'"system_fingerprint":"{start["system_fingerprint"]}","choices":['
    )
    first, second = (TOKENIZER.decode([token_id]) for token_id in encode(OUTPUT)[:2])
    expected = [
        f'{head}{{"index":0,"text":"{first}","logprobs":null,"finish_reason":null}}],"usage":null}}',
        f'{head}{{"index":0,"text":"{second}","logprobs":null,"finish_reason":"length",'
        '"stop_reason":null,"raw_finish_reason":"max_tokens"}],"usage":null}',
        f'{head}],"usage":{json.dumps(usage, separators=(",", ":"))}}}',
        "data: [DONE]",
        "",
    ]
    assert data.decode() == "\n\n".join(expected)
    assert usage["completion_tokens"] == 2


@pytest.mark.parametrize("stop", [None, "🦊", ["好 🦊, st", "zzz"], "never there"])
def test_streamed_and_whole_text_are_equal(client: Client, stop: Any) -> None:
    body = {"prompt": "tell", "stop": stop, "n": 3}
    _, whole = client.post("/v1/completions", **body)
    events = client.events("/v1/completions", **body)
    for choice in whole["choices"]:
        mine = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        assert mine[-1]["raw_finish_reason"] == choice["raw_finish_reason"]


def test_a_stop_string_aborts_the_rest(client: Client, core: FakeCore) -> None:
    status, response = client.post("/v1/completions", prompt="forever", stop=["d w"])
    assert status == 200
    assert response["choices"][0]["text"] == "wor"
    assert response["choices"][0]["stop_reason"] == "d w"
    core.wait_for(lambda: core.requests[-1].request_ids[0] in core.aborted)
    assert core.abort_reasons[core.requests[-1].request_ids[0]] is FinishReason.STOP_STRING


@pytest.mark.parametrize("prompt", ["forever", "silence"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_all_its_choices(
    client: Client, core: FakeCore, prompt: str, stream: bool
) -> None:
    core.requests.clear()
    with socket.create_connection(("127.0.0.1", client.port), DEADLINE_S) as connection:
        body = json.dumps({"prompt": prompt, "stream": stream, "n": 2, "max_tokens": 2000})
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        core.wait_for(lambda: len(core.requests) == 2)
        if stream and prompt == "forever":
            assert connection.recv(4096)
    core.wait_for(lambda: {r.request_ids[0] for r in core.requests} <= set(core.aborted))


def test_an_engine_error_is_a_500(client: Client) -> None:
    status, response = client.post("/v1/completions", prompt="error")
    assert status == 500
    assert response["error"] == {
        "message": "out of luck",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }


def test_an_engine_error_ends_a_stream_with_an_error_event(client: Client) -> None:
    body = {"prompt": "error", "stream": True}
    status, data, _ = client.exchange("POST", "/v1/completions", body)
    assert status == 200
    *_, last, done = data.decode().rstrip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "out of luck"
    assert done == "data: [DONE]"


def test_unknown_models_routes_and_methods(client: Client) -> None:
    status, response = client.post("/v1/chat/completions", messages=USER, model="other")
    assert (status, response["error"]["code"], response["error"]["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert client.call("GET", "/v1/models/other")[0] == 404
    status, response = client.call("GET", "/v2/nothing")
    assert (status, response["error"]["type"]) == (404, "invalid_request_error")
    status, data, headers = client.exchange("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert json.loads(data)["error"]["message"] == "/v1/completions supports POST, not GET"
    for path in ("/status/events", "/v1/streams/x", "/v1/responses/x"):  # a stream is no body for HEAD
        assert client.exchange("HEAD", path)[0] == 405


def test_a_body_over_the_limit_is_a_413(client: Client) -> None:
    status, response = client.call("POST", "/v1/completions", raw=b" " * (9 << 20))
    assert status == 413
    assert "8388608" in response["error"]["message"]
    assert "--max-body-bytes" in response["error"]["message"]


def test_small_routes(client: Client) -> None:
    assert client.call("GET", "/health") == (200, {"status": "ok"})
    assert client.call("GET", "/ready") == (200, {"status": "ready"})
    assert client.call("GET", "/version")[1]["version"]
    (card,) = client.call("GET", "/v1/models")[1]["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 2048)


def test_long_prompts_go_through_the_threads(client: Client) -> None:
    prompt = "one two three " * 300
    _, response = client.post("/v1/completions", prompt=prompt, max_tokens=1)
    assert response["usage"]["prompt_tokens"] == len(encode(prompt))


def test_an_idle_stream_to_a_client_that_does_not_read_delays_no_request(
    client: Client, core: FakeCore
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "forever", "stream": True}))
        core.wait_for(lambda: core.requests)
        for _ in range(5):
            assert client.post("/v1/completions", prompt="tell")[0] == 200


def test_not_ready_before_the_core_is(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with (
        FakeCore(tmp_path, script_by_prompt, is_ready=False) as core,
        running_frontend(core, checkpoint, wait=False) as client,
    ):
        assert client.call("GET", "/health")[0] == 200
        status, data, headers = client.exchange("GET", "/ready")
        assert (status, headers["retry-after"]) == (503, "2")
        assert "starting" in json.loads(data)["reason"]
        status, response = client.post("/v1/completions", prompt="tell")
        assert (status, response["error"]["type"]) == (503, "server_error")


def test_a_dead_core_fails_running_and_later_requests(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with (
        FakeCore(tmp_path, script_by_prompt) as core,
        running_frontend(core, checkpoint, max_replays=0) as client,
    ):
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "silence"}))
            core.wait_for(lambda: core.requests)
            core.die("worker 0 ran out of memory")
            response = connection.getresponse()
            assert response.status == 500
            error = json.loads(response.read())["error"]
        assert error["code"] == "engine_dead"
        assert "worker 0 ran out of memory" in error["message"]
        status, ready = client.call("GET", "/ready")
        assert (status, "out of memory" in ready["reason"]) == (503, True)
        assert client.call("GET", "/health")[0] == 200
        assert client.post("/v1/completions", prompt="tell")[1]["error"]["code"] == "engine_dead"


def test_a_core_that_vanishes_is_dead_too(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with running_frontend(core := FakeCore(tmp_path, script_by_prompt), checkpoint, wait=False) as client:
        with core:
            core.wait_for(lambda: client.exchange("GET", "/ready")[0] == 200)
        core.wait_for(lambda: client.exchange("GET", "/ready")[0] == 503)


def test_without_a_tokenizer_ids_go_in_and_out(tmp_path: Path) -> None:
    bare = tiny_tokenizer.checkpoint(tmp_path, tokenizer_file=None, chat_template_file=None)
    with (
        FakeCore(tmp_path, lambda _: Script([7, 8, 9])) as core,
        running_frontend(core, bare) as client,
    ):
        _, response = client.post("/v1/completions", prompt=[3, 4])
        assert (response["choices"][0]["text"], response["choices"][0]["token_ids"]) == ("", [7, 8, 9])
        events = client.events("/v1/completions", prompt=[3, 4])
        assert [i for event in events for i in event["choices"][0]["token_ids"]] == [7, 8, 9]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        for path, body in (
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/completions", {"prompt": [3], "stop": "x"}),
            ("/v1/chat/completions", {"messages": USER}),
        ):
            status, refusal = client.post(path, **body)
            assert status == 400
            assert re.search("no tokenizer|no chat template", refusal["error"]["message"])
