"""One timed request to each kind of server.

`ASYNC_REQUEST_FUNCS[backend](request, session)` sends a RequestFuncInput and returns a
RequestFuncOutput; failures of the server or the network are in its `error`.

    ttft          from sending to the first event with a token
    itl           between two events with tokens; two tokens in one event give one value
    latency       from sending to the last event with a token

Times are taken when bytes are read, before they are decoded. The body is encoded before the first time
is taken.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import msgspec

from atom.benchmarks.serving import events
from atom.benchmarks.serving.events import Part
from atom.benchmarks.serving.sse import EventSplitter
from atom.shared.utils import envs

__all__ = [
    "ASYNC_REQUEST_FUNCS",
    "BACKENDS",
    "Backend",
    "RequestFuncInput",
    "RequestFuncOutput",
    "async_request_deepspeed_mii",
    "async_request_openai_chat_completions",
    "async_request_openai_completions",
    "async_request_tgi",
    "async_request_trt_llm",
]

_DONE = b"[DONE]"
_ERROR_BYTES = 2000


@dataclass
class RequestFuncInput:
    """What is sent to one backend."""

    prompt: str | list[int]
    """Text, or token ids for backends that take them."""
    api_url: str
    prompt_len: int
    output_len: int
    model: str
    model_name: str | None = None
    """Name of the model on the server; `model` if None."""
    best_of: int = 1
    logprobs: int | None = None
    extra_body: dict[str, Any] | None = None
    """Additional fields of the body."""
    multi_modal_content: dict[str, Any] | None = None
    """A content part in addition to the prompt, for chat only."""
    ignore_eos: bool = False
    headers: dict[str, str] | None = None
    """Additional HTTP headers."""

    @property
    def served_name(self) -> str:
        """The body's `model`."""
        return self.model_name or self.model


@dataclass
class RequestFuncOutput:
    """The result of a request; times in seconds."""

    generated_text: str = ""
    success: bool = False
    latency: float = 0.0
    output_tokens: int | None = None
    """The server's count; None without usage."""
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    tpot: float = 0.0
    """Set by `calculate_metrics`."""
    prompt_len: int = 0
    error: str = ""
    prompt_tokens: int | None = None
    """The server's count; None without usage."""
    cached_tokens: int | None = None
    """Prompt tokens from the server's prefix cache; None if its usage does not say."""

    @property
    def events(self) -> int:
        """Events with tokens."""
        return len(self.itl) + self.success


@dataclass(frozen=True)
class Backend:
    """A protocol: the request's body, and the format of the response."""

    payload: Callable[[RequestFuncInput], dict[str, Any]]
    read: Callable[[bytes], Part]
    """Reads an event, or the whole response of a backend that does not stream."""
    endings: tuple[str, ...]
    """Accepted endings of --endpoint."""
    streams: bool = True
    takes_ids: bool = False
    ignores_eos: bool = True
    """Whether it supports --ignore-eos."""
    beams: bool = False
    """Whether it supports best_of and use_beam_search."""
    logprobs: bool = False


RequestFunc = Callable[[RequestFuncInput, aiohttp.ClientSession], Awaitable[RequestFuncOutput]]


async def _request(
    backend: Backend, request: RequestFuncInput, session: aiohttp.ClientSession
) -> RequestFuncOutput:
    """Send a request and time its response; failures become `error`."""
    output = RequestFuncOutput(prompt_len=request.prompt_len)
    body = msgspec.json.encode(backend.payload(request) | (request.extra_body or {}))
    headers = _headers() | (request.headers or {})
    started = time.perf_counter()
    try:
        async with session.post(request.api_url, data=body, headers=headers) as response:
            if response.status != 200:
                output.error = await _refusal(response)
            elif backend.streams:
                await _read_stream(response, backend, output, started)
            else:
                await _read_whole(response, backend, output, started)
    except TimeoutError:  # a subclass of OSError
        output.error = "the response did not end in time"
    except (aiohttp.ClientError, OSError) as error:
        output.error = f"{type(error).__name__}: {error}"
    except msgspec.DecodeError as error:
        output.error = f"the response is invalid: {error}"
    output.success = not output.error
    return output


async def _read_stream(
    response: aiohttp.ClientResponse, backend: Backend, output: RequestFuncOutput, started: float
) -> None:
    """Read a stream to its end."""
    splitter = EventSplitter()
    read = backend.read
    texts: list[str] = []
    last = 0.0
    itl = output.itl

    def record(received: list[bytes], now: float) -> None:
        nonlocal last
        for event in received:
            if event == _DONE:
                continue
            part = read(event)
            if part.text is not None:
                texts.append(part.text)
                if last:
                    itl.append(now - last)
                else:
                    output.ttft = now - started
                last = now
            if part.output_tokens is not None:
                output.output_tokens = part.output_tokens
                output.prompt_tokens = part.prompt_tokens
                output.cached_tokens = part.cached_tokens
            output.error = output.error or part.error

    async for chunk in response.content.iter_any():
        record(splitter.feed(chunk), time.perf_counter())
    record(splitter.end(), time.perf_counter())
    output.generated_text = "".join(texts)
    output.latency = last - started if last else 0.0
    if not last:
        output.error = output.error or "the stream ended without a token"


async def _read_whole(
    response: aiohttp.ClientResponse, backend: Backend, output: RequestFuncOutput, started: float
) -> None:
    """Read a response that is not streamed; its `ttft` stays 0."""
    content = await response.read()
    output.latency = time.perf_counter() - started
    part = backend.read(content)
    output.generated_text = part.text or ""
    output.output_tokens = part.output_tokens
    output.error = part.error or ("" if part.text is not None else "the response has no text")


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = (await response.content.read(_ERROR_BYTES)).decode(errors="replace").strip()
    return f"status {response.status} {response.reason or ''}: {text}".strip()


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if key := envs.OPENAI_API_KEY:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _completions_payload(request: RequestFuncInput) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "model": request.served_name,
        "prompt": request.prompt,
        "temperature": 0.0,
        "best_of": request.best_of,
        "max_tokens": request.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.logprobs is not None:
        payload["logprobs"] = request.logprobs
    if request.ignore_eos:
        payload["ignore_eos"] = True
    return payload


def _chat_payload(request: RequestFuncInput) -> dict[str, Any]:
    content: Any = request.prompt
    if request.multi_modal_content:
        content = [{"type": "text", "text": request.prompt}, request.multi_modal_content]
    payload: dict[str, Any] = {
        "model": request.served_name,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.0,
        "max_completion_tokens": request.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.logprobs is not None:
        payload |= {"logprobs": True, "top_logprobs": request.logprobs}
    if request.ignore_eos:
        payload["ignore_eos"] = True
    return payload


def _tgi_payload(request: RequestFuncInput) -> dict[str, Any]:
    # TGI has no temperature 0, and no greedy stream with best_of.
    parameters = {
        "best_of": request.best_of,
        "max_new_tokens": request.output_len,
        "do_sample": True,
        "temperature": 0.01,
        "top_p": 0.99,
        "truncate": request.prompt_len,
        "ignore_eos_token": request.ignore_eos,
    }
    return {"inputs": request.prompt, "parameters": parameters}


def _tensorrt_payload(request: RequestFuncInput) -> dict[str, Any]:
    payload = {
        "accumulate_tokens": True,
        "text_input": request.prompt,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": request.output_len,
        "stream": True,
    }
    if request.ignore_eos:  # there is no such field; min_length has the same effect
        payload["min_length"] = request.output_len
    return payload


def _mii_payload(request: RequestFuncInput) -> dict[str, Any]:
    return {
        "model": request.served_name,
        "prompt": request.prompt,
        "max_tokens": request.output_len,
        "temperature": 0.01,  # 0 is not allowed
        "top_p": 1.0,
    }


BACKENDS: dict[str, Backend] = dict.fromkeys(
    ("vllm", "openai", "sglang", "lmdeploy", "scalellm"),
    Backend(
        _completions_payload,
        events.completions,
        ("completions", "profile"),
        takes_ids=True,
        beams=True,
        logprobs=True,
    ),
) | {
    "openai-chat": Backend(_chat_payload, events.chat, ("chat/completions", "profile"), logprobs=True),
    "tgi": Backend(_tgi_payload, events.tgi, ("generate_stream",)),
    "tensorrt-llm": Backend(_tensorrt_payload, events.tensorrt_llm, ("generate_stream",)),
    "deepspeed-mii": Backend(_mii_payload, events.deepspeed_mii, ("",), streams=False, ignores_eos=False),
}
ASYNC_REQUEST_FUNCS: dict[str, RequestFunc] = {
    name: partial(_request, backend) for name, backend in BACKENDS.items()
}

# Names that existing scripts import.
async_request_openai_completions = ASYNC_REQUEST_FUNCS["openai"]
async_request_openai_chat_completions = ASYNC_REQUEST_FUNCS["openai-chat"]
async_request_tgi = ASYNC_REQUEST_FUNCS["tgi"]
async_request_trt_llm = ASYNC_REQUEST_FUNCS["tensorrt-llm"]
async_request_deepspeed_mii = ASYNC_REQUEST_FUNCS["deepspeed-mii"]
