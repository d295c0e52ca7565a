"""Every renderer, with a reply cut into updates at random: what a client reads is always the same."""

import json
import random
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from atom.shared.messages.engine import AddRequest, Sampling
from frontend.api.chat.renderer import chat_renderer
from frontend.api.generation.generate_request import GenerateRequest, ResponseOptions
from frontend.api.generation.logprobs import TokenFormatter
from frontend.api.generation.prompts import Prompt
from frontend.api.generation.renderer import Renderer
from frontend.api.messages.renderer import MessagesRenderer
from frontend.api.responses.renderer import ResponseEcho, ResponsesRenderer
from frontend.api.schemas.generation import CompletionTokensDetails, PromptTokensDetails, Usage
from frontend.errors import EngineError
from frontend.text.output_processor import SequenceOutput, TextOptions
from frontend.text.reply_formats.base import CallDelta

REASONING, TEXT = 'Two "cities".\n', "Looking…\u2028 😀 <b>"
ARGUMENTS = ['{"city": "Paris"}', '{"city": "北京"}']
NULL = msgspec.Raw(b"null")
ECHO = ResponseEcho(
    instructions=NULL,
    max_output_tokens=None,
    metadata=NULL,
    parallel_tool_calls=True,
    previous_response_id=None,
    effort=None,
    store=False,
    temperature=None,
    text=NULL,
    tool_choice=NULL,
    tools=NULL,
    top_p=None,
    shows_encrypted=True,
)
REQUEST = GenerateRequest(
    id="x_1",
    model="m",
    operation="chat",
    fingerprint="f",
    created=1,
    requests=[AddRequest([7], b"", 1, Sampling(1.0, 0, 1.0, 0.0, 0))],
    prompts=[Prompt([1, 2, 3])],
    text=TextOptions(),
    options=ResponseOptions(TokenFormatter(None, as_ids=True), usage=True),
    n=1,
    streaming=True,
    warnings=[],
    started=0.0,
    new_renderer=chat_renderer,
)
RENDERERS: dict[str, Callable[[GenerateRequest], Renderer]] = {
    "chat": chat_renderer,
    "messages": MessagesRenderer,
    "responses": partial(ResponsesRenderer, echo=ECHO),
}
USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=9,
    total_tokens=12,
    prompt_tokens_details=PromptTokensDetails(1),
    completion_tokens_details=CompletionTokensDetails(2),
    ttft_s=0.0,
    tpot_s=0.0,
    latency_s=0.0,
)


def small_updates() -> Iterator[SequenceOutput]:
    """One character each."""
    for letter in REASONING:
        yield SequenceOutput(7, array("i", [1]), reasoning=letter)
    for letter in TEXT:
        yield SequenceOutput(7, array("i", [1]), letter)
    for index, arguments in enumerate(ARGUMENTS):
        yield SequenceOutput(7, array("i", [1]), calls=[CallDelta(index, f"call_{index}", "weather")])
        for letter in arguments:
            yield SequenceOutput(7, array("i", [1]), calls=[CallDelta(index, arguments=letter)])
    yield SequenceOutput(7, array("i", [1]), finished=True, reason="eos", called=True)


def cut(source: random.Random, longest: int) -> list[SequenceOutput]:
    """Runs of up to `longest` updates as one."""
    merged: list[SequenceOutput] = []
    left = 0
    for update in small_updates():
        if left:
            merged[-1].merge(update)
        else:
            left = source.randrange(1, longest + 1)
            merged.append(update)
        left -= 1
    return merged


def stream(name: str, updates: list[SequenceOutput]) -> list[Any]:
    renderer = RENDERERS[name](REQUEST)
    data = renderer.start() + renderer.begin(0, updates[0], None)
    data += b"".join(renderer.delta(0, update, None) for update in updates) + renderer.end(USAGE)
    lines = [line for line in data.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def read_chat(events: list[Any]) -> Any:
    reasoning, text, calls = "", "", ["", ""]
    for event in events[:-1]:
        delta = event["choices"][0]["delta"]
        reasoning += delta.get("reasoning", "")
        text += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            calls[call["index"]] += call["function"]["arguments"]
    return reasoning, text, calls


def read_messages(events: list[Any]) -> Any:
    blocks: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append("")
        if event["type"] == "content_block_delta":
            (value,) = (value for key, value in event["delta"].items() if key != "type")
            blocks[event["index"]] += value
    return blocks[0], blocks[1], blocks[2:]


def read_responses(events: list[Any]) -> Any:
    texts = [""] * 4
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    output = events[-1]["response"]["output"]
    whole = [i["arguments"] if "arguments" in i else i["content"][0]["text"] for i in output]
    assert whole == texts
    return texts[0], texts[1], texts[2:]


READERS = {"chat": read_chat, "messages": read_messages, "responses": read_responses}


@pytest.mark.parametrize("name", RENDERERS)
def test_a_stream_does_not_depend_on_its_cuts(name: str) -> None:
    source = random.Random(name)
    for longest in (1, 2, 3, 7, 20, 200):
        for _ in range(20):
            assert READERS[name](stream(name, cut(source, longest))) == (REASONING, TEXT, ARGUMENTS)


@pytest.mark.parametrize("name", RENDERERS)
def test_a_failure_in_a_stream(name: str) -> None:
    renderer = RENDERERS[name](REQUEST)
    renderer.start()
    renderer.delta(0, next(small_updates()), None)
    data = renderer.error(EngineError("the engine failed")).decode()
    assert "the engine failed" in data and data.endswith("\n\n")
    kinds = {"chat": "data: [DONE]", "messages": "event: error\n", "responses": "event: response.failed\n"}
    assert kinds[name] in data
