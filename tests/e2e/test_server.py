"""The server from outside: 64 concurrent streams, chat, imports of its processes, shutdown, bad flags."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints.smollm2 import NEW_TOKENS, NUM_LONG, PROMPTS, gguf_path, prepared, references
from tests.helpers.servers.server import STOP_DEADLINE_S, Server, is_alive, running_server

pytestmark = pytest.mark.timeout(600)

ARGS = (
    "--model",
    gguf_path(),
    "--served-model-name",
    "smollm2",
    "--dtype",
    "float32",
    "--max-model-len",
    "2048",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*ARGS) as running:
        yield running


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
        **more,
    }


async def stream_text(
    session: aiohttp.ClientSession, request: dict[str, Any], begun: Callable[[], None] = lambda: None
) -> str:
    """`begun` is called when the response has begun."""
    text = ""
    async with session.post("/v1/completions", json={**request, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        begun()
        lines = [line.decode().strip() async for line in answer.content]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            text += choice["text"]
    return text


async def plain_text(session: aiohttp.ClientSession, request: dict[str, Any]) -> str:
    async with session.post("/v1/completions", json=request) as answer:
        assert answer.status == 200, await answer.text()
        reply = await answer.json()
    assert reply["usage"]["completion_tokens"] == NEW_TOKENS
    return str(reply["choices"][0]["text"])


def test_64_streams_and_16_whole_responses_equal_the_reference(server: Server) -> None:
    tokenizer = Tokenizer.from_checkpoint(prepared())
    assert tokenizer is not None
    short = list(zip(PROMPTS, references(), strict=True))[:-NUM_LONG]
    crowd = [short[i % len(short)] for i in range(64)]
    wanted = [tokenizer.decode(reference.greedy_ids) for _, reference in crowd]

    async def drive() -> tuple[list[str], list[str]]:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
            streamed = await asyncio.gather(*(stream_text(session, body(prompt)) for prompt, _ in crowd))
            plain = await asyncio.gather(*(plain_text(session, body(prompt)) for prompt, _ in crowd[:16]))
        return streamed, plain

    streamed, plain = asyncio.run(drive())
    assert streamed == wanted
    assert plain == wanted[:16]


def test_chat_with_usage(server: Server) -> None:
    async def drive() -> list[dict[str, Any]]:
        request = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_completion_tokens": 24,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with (
            aiohttp.ClientSession(server.url) as session,
            session.post("/v1/chat/completions", json=request) as answer,
        ):
            lines = [line.decode().strip() async for line in answer.content]
        assert lines[-2 if not lines[-1] else -1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    events = asyncio.run(drive())
    text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
    assert "Paris" in text
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] <= 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["latency_s"] >= usage["ttft_s"] > 0
    assert "cached_tokens" in usage["prompt_tokens_details"]


def test_all_chat_routes_generate_the_same_text(server: Server) -> None:
    """With the official clients, whole and streamed."""
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    options: dict[str, Any] = {"model": "smollm2", "temperature": 0}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as sdk,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as claude,
    ):
        chat = sdk.chat.completions.create(**options, messages=messages, max_tokens=16)
        whole = sdk.responses.create(**options, input=messages, max_output_tokens=16)
        with sdk.responses.stream(**options, input=messages, max_output_tokens=16) as stream:
            streamed = stream.until_done().get_final_response()
        with claude.messages.stream(
            model="smollm2", messages=messages, max_tokens=16, extra_body={"temperature": 0}
        ) as events:
            message = events.get_final_message()
        asked = sdk.responses.create(
            **options, input="Of Italy?", previous_response_id=whole.id, max_output_tokens=16
        )
    expected = chat.choices[0].message.content or ""
    assert "Paris" in expected
    assert whole.output_text == streamed.output_text == expected
    assert "".join(block.text for block in message.content if block.type == "text") == expected
    assert chat.usage and whole.usage and asked.usage
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    assert "Rome" in asked.output_text and asked.usage.input_tokens_details.cached_tokens > 0


def test_frontend_and_core_run_without_torch(server: Server) -> None:
    names = server.children()
    torch_free = [
        pid for pid, line in names.items() if "frontend.main" in line or "engine_core.process" in line
    ]
    workers = [pid for pid, line in names.items() if "workers.main" in line]
    assert len(torch_free) == 2 and len(workers) == 1
    for pid in torch_free:
        with open(f"/proc/{pid}/maps") as maps:
            assert "libtorch" not in maps.read()
    with open(f"/proc/{workers[0]}/maps") as maps:
        assert "libtorch" in maps.read()


def test_sigterm_finishes_running_requests(server: Server) -> None:
    """The last test of this server."""

    async def drive() -> str:
        async with aiohttp.ClientSession(server.url) as session:
            request = body("Hello", max_tokens=64)
            return await stream_text(session, request, lambda: server.process.send_signal(signal.SIGTERM))

    children = server.children()
    assert len(asyncio.run(drive())) > 0
    assert server.process.wait(STOP_DEADLINE_S) == 0
    assert not [pid for pid in children if is_alive(pid)]


@pytest.mark.parametrize(
    ("args", "words", "status"),
    [
        (["--model", "/nonexistent/model"], "/nonexistent/model", 3),
        (["--model", gguf_path(), "--max-model-len", "999999"], "8192", 2),
        (["--model", gguf_path(), "-tp", "64"], "tensor", 2),
        (["--model", gguf_path(), "--frobnicate"], "--frobnicate", 2),
        (["--model", gguf_path(), "--enable-expert-parallel"], "--enable-expert-parallel", 2),
        (["--model", gguf_path(), "--method", "mtp"], "--method", 2),
    ],
)
def test_bad_configuration_is_one_line(args: list[str], words: str, status: int) -> None:
    command = [sys.executable, "-m", "atom.entrypoints.openai_server", "--server-port", "0", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert done.returncode == status
    assert len(errors) == 1 and words in errors[0]
    assert "Traceback" not in done.stderr
