"""One request to each kind of server: its body, and reading the response."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from atom.benchmarks.backend_request_func import (
    ASYNC_REQUEST_FUNCS,
    RequestFuncInput,
    RequestFuncOutput,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

COMPLETIONS = [
    {"choices": [{"index": 0, "text": "a"}], "usage": None},
    {"choices": [{"index": 0, "text": ""}]},
    {"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}},
]
CHAT = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"reasoning_content": "a"}}]},
    {"choices": [{"delta": {"content": "b"}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]
TGI = [
    {"token": {"id": 5, "text": "a"}},
    {"token": {"id": 5, "text": ""}},
    {"token": {"id": 6, "text": "b"}, "generated_text": "ab", "details": {"generated_tokens": 3}},
]
TENSORRT = [{"text_output": "a"}, {"text_output": ""}, {"text_output": "b"}]
OPENAI_BACKENDS = ("vllm", "openai", "sglang", "lmdeploy", "scalellm")


def ask(
    backend: str, handler: Handler, deadline_s: float = 60.0, **changes: Any
) -> tuple[RequestFuncOutput, dict[str, Any]]:
    """The output, and the body and headers that the server received."""
    seen: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        seen["body"], seen["headers"] = await request.json(), dict(request.headers)
        return await handler(request)

    async def run() -> RequestFuncOutput:
        app = web.Application()
        app.router.add_post("/go", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        fields = {"prompt": "hello", "prompt_len": 4, "output_len": 3, "model": "dir/m"} | changes
        request = RequestFuncInput(api_url=f"http://127.0.0.1:{port}/go", **fields)
        try:
            limit = aiohttp.ClientTimeout(total=deadline_s)
            async with aiohttp.ClientSession(timeout=limit) as session:
                return await ASYNC_REQUEST_FUNCS[backend](request, session)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), seen


def streaming(events: list[dict[str, Any]], pause: float = 0.0, done: bool = True) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await asyncio.sleep(pause)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if done:
            await response.write(b"data: [DONE]\n\n")
        return response

    return handler


def whole(status: int, body: Any) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handler


@pytest.mark.parametrize(
    ("backend", "events", "tokens"),
    [
        *((name, COMPLETIONS, 3) for name in OPENAI_BACKENDS),
        ("openai-chat", CHAT, 3),
        ("tgi", TGI, 3),
        ("tensorrt-llm", TENSORRT, None),
    ],
)
def test_streams(backend: str, events: list[dict[str, Any]], tokens: int | None) -> None:
    output, _ = ask(backend, streaming(events, pause=0.02))
    assert output.success and output.error == ""
    assert output.generated_text == "ab"
    assert output.output_tokens == tokens
    assert len(output.itl) == 2 and output.events == 3
    assert 0.02 <= output.ttft < output.latency
    assert output.latency == pytest.approx(output.ttft + sum(output.itl))


def test_a_server_that_does_not_stream() -> None:
    for answer in ({"text": ["ab"]}, {"choices": [{"text": "ab"}], "usage": {"completion_tokens": 3}}):
        output, _ = ask("deepspeed-mii", whole(200, answer))
        assert output.success and output.generated_text == "ab" and output.latency > 0
        assert (output.ttft, output.itl) == (0.0, [])


@pytest.mark.parametrize("backend", OPENAI_BACKENDS)
def test_completions_body(backend: str) -> None:
    _, seen = ask(backend, streaming(COMPLETIONS), prompt=[1, 2, 3, 4])
    assert seen["body"] == {
        "model": "dir/m",
        "prompt": [1, 2, 3, 4],
        "temperature": 0.0,
        "best_of": 1,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    more = {"model_name": "served", "logprobs": 2, "ignore_eos": True, "best_of": 4}
    _, seen = ask(backend, streaming(COMPLETIONS), extra_body={"use_beam_search": True}, **more)
    body = seen["body"]
    assert body["model"] == "served" and body["logprobs"] == 2 and body["ignore_eos"] is True
    assert body["best_of"] == 4 and body["use_beam_search"] is True


def test_chat_body() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    _, seen = ask("openai-chat", streaming(CHAT), logprobs=2, ignore_eos=True, multi_modal_content=picture)
    body = seen["body"]
    content = [{"type": "text", "text": "hello"}, picture]
    assert body["messages"] == [{"role": "user", "content": content}]
    assert body["max_completion_tokens"] == 3 and body["ignore_eos"] is True
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)
    _, seen = ask("openai-chat", streaming(CHAT))
    assert seen["body"]["messages"] == [{"role": "user", "content": "hello"}]


def test_other_bodies() -> None:
    _, seen = ask("tgi", streaming(TGI), ignore_eos=True)
    assert seen["body"]["inputs"] == "hello"
    parameters = seen["body"]["parameters"]
    assert parameters["max_new_tokens"] == 3 and parameters["ignore_eos_token"] is True
    _, seen = ask("tensorrt-llm", streaming(TENSORRT), ignore_eos=True)
    assert (seen["body"]["text_input"], seen["body"]["min_length"]) == ("hello", 3)
    _, seen = ask("deepspeed-mii", whole(200, {"text": "x"}))
    assert (seen["body"]["prompt"], seen["body"]["max_tokens"]) == ("hello", 3)


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    _, seen = ask("vllm", streaming(COMPLETIONS))
    assert "Authorization" not in seen["headers"]
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    _, seen = ask("vllm", streaming(COMPLETIONS))
    assert seen["headers"]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (whole(503, {"error": "busy"}), 'status 503 Service Unavailable: {"error": "busy"}'),
        (streaming([COMPLETIONS[0], {"error": {"message": "out of memory"}}]), "out of memory"),
        (streaming([]), "the stream ended without a token"),
        (streaming([COMPLETIONS[3]]), "the stream ended without a token"),
        (streaming([{"choices": "none"}]), "the response is invalid"),
    ],
)
def test_failures_are_texts(handler: Handler, error: str) -> None:
    output, _ = ask("vllm", handler)
    assert not output.success and error in output.error


def test_a_response_that_does_not_end_in_time_is_a_failure() -> None:
    output, _ = ask("vllm", streaming([COMPLETIONS[0]], pause=5), deadline_s=1.0)
    assert not output.success and "the response did not end in time" in output.error


def test_a_connection_that_breaks_is_a_failure() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    output, _ = ask("vllm", cut)
    assert not output.success and output.error.startswith("Client")


def test_a_refused_connection_is_a_failure() -> None:
    async def run() -> RequestFuncOutput:
        request = RequestFuncInput("x", "http://127.0.0.1:9/v1/completions", 1, 1, "m")
        async with aiohttp.ClientSession() as session:
            return await ASYNC_REQUEST_FUNCS["vllm"](request, session)

    assert "Cannot connect" in asyncio.run(run()).error
