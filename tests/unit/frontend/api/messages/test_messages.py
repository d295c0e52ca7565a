"""/v1/messages with the official client: text, reasoning, tools, streams, counts, errors."""

# mypy: disable-error-code="call-overload,list-item,arg-type,union-attr,index"

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from frontend.api.messages.schema import MESSAGES
from frontend.api.responses.schema import RESPONSES
from frontend.api.schemas.fields import Schema
from frontend.errors import RequestError
from tests.helpers.servers.http_server import DEADLINE_S, MODEL, Client
from tests.helpers.servers.tool_model import (
    ANSWER,
    ARGUMENTS,
    REASONING,
    TEXT,
    USER,
    ToolModel,
    running_model,
    running_server,
)

PATH = "/v1/messages"
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 4096, "messages": [USER]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolModel]:
    with running_model(tmp_path_factory.mktemp("messages")) as model:
        yield model


@pytest.fixture(scope="module")
def client(model: ToolModel) -> Iterator[Client]:
    with running_server(model) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(client: Client) -> Iterator[anthropic.Anthropic]:
    url = client.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="x", timeout=DEADLINE_S, max_retries=0) as sdk:
        yield sdk


def test_a_round_trip(sdk: anthropic.Anthropic, model: ToolModel) -> None:
    first = sdk.messages.create(**ASKED, tools=[WEATHER], system=[{"type": "text", "text": "Be brief."}])
    thinking, text, *calls = first.content
    assert thinking.type == "thinking" and thinking.thinking == REASONING
    assert text.type == "text" and text.text == TEXT
    assert [call.input for call in calls if call.type == "tool_use"] == [json.loads(a) for a in ARGUMENTS]
    assert (first.stop_reason, first.stop_sequence, first.model) == ("tool_use", None, MODEL)
    prompt = model.prompt()
    assert "<|im_start|>system\nBe brief." in prompt and '"parameters": {"type": "object"' in prompt
    assert first.usage.output_tokens > 20 and first.usage.input_tokens > 20

    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20 °C"}]}
        for call in calls
        if call.type == "tool_use"
    ]
    results[1] |= {"is_error": True}
    messages = [
        USER,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    last = sdk.messages.create(**(ASKED | {"messages": messages}), tools=[WEATHER])
    assert [block.type for block in last.content] == ["text"] and last.content[0].text == ANSWER
    assert last.stop_reason == "end_turn"
    prompt = model.prompt()
    assert f"<think>{REASONING}</think>{TEXT}<tool_call>" in prompt
    assert "<tool_response>20 °C</tool_response>" in prompt
    assert "<tool_response>Error: 20 °C</tool_response><|im_end|><|im_start|>user\nGo on." in prompt


def test_a_stream_makes_the_same_message(sdk: anthropic.Anthropic) -> None:
    whole = sdk.messages.create(**ASKED, tools=[WEATHER])
    with sdk.messages.stream(**ASKED, tools=[WEATHER]) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert {"thinking", "text", "input_json"} <= set(kinds)
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    for block, other in zip(whole.content, streamed.content, strict=True):
        assert block.model_dump(exclude={"id"}) == other.model_dump(exclude={"id", "parsed_output"})
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


def events_of(client: Client, **body: Any) -> list[dict[str, Any]]:
    status, data, _ = client.exchange("POST", PATH, body | {"stream": True})
    assert status == 200, data
    events = []
    for frame in data.decode().split("\n\n")[:-1]:
        event, _, payload = frame.partition("\n")
        events.append(json.loads(payload.removeprefix("data: ")))
        assert event == f"event: {events[-1]['type']}"
    return events


def test_every_cut_of_a_stream(client: Client, model: ToolModel) -> None:
    """Whatever ends by length, and wherever updates are cut: blocks follow one another and are complete."""
    for limit in range(1, 120, 7):
        asked = ASKED | {"max_tokens": limit, "tools": [WEATHER]}
        _, whole = client.post(PATH, **asked)
        blocks: list[dict[str, Any]] = []
        is_open = False
        for event in events_of(client, **asked):
            match event:
                case {"type": "content_block_start", "index": index, "content_block": block}:
                    assert not is_open and index == len(blocks)
                    blocks.append(block | {"text": "", "kind": block["type"]})
                    is_open = True
                case {"type": "content_block_delta", "index": index, "delta": delta}:
                    assert is_open and index == len(blocks) - 1
                    (text,) = (value for name, value in delta.items() if name != "type")
                    blocks[-1]["text"] += text
                case {"type": "content_block_stop"}:
                    is_open = False
                case {"type": "message_delta", "delta": delta, "usage": usage}:
                    assert delta["stop_reason"] == whole["stop_reason"]
                    assert usage["output_tokens"] == whole["usage"]["output_tokens"]
        assert not is_open
        for kind in ("thinking", "text"):  # text after a call is a block of its own in a stream
            streamed = "".join(block["text"] for block in blocks if block["kind"] == kind)
            assert streamed == "".join(b[kind] for b in whole["content"] if b["type"] == kind)
        inputs = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
        texts = [block["text"] for block in blocks if block["kind"] == "tool_use"]
        for text, given in zip(texts, inputs, strict=True):  # what is no JSON is handed on as text
            assert text == given["arguments"] if "arguments" in given else json.loads(text) == given


def test_stops_and_prefill(sdk: anthropic.Anthropic, model: ToolModel) -> None:
    stopped = sdk.messages.create(**ASKED, stop_sequences=["sun"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "sun")
    cut = sdk.messages.create(**(ASKED | {"max_tokens": 2}))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    prefill = [USER, {"role": "assistant", "content": "Well,"}]
    sdk.messages.create(**(ASKED | {"messages": prefill}))
    assert model.prompt().endswith("<|im_start|>assistant\nWell,")


def test_thinking_switches_the_template(sdk: anthropic.Anthropic, model: ToolModel) -> None:
    sdk.messages.create(**ASKED, thinking={"type": "disabled"})
    assert model.prompt().endswith("</think>\n\n")
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        sdk.messages.create(**ASKED, thinking=thinking)
        assert model.prompt().endswith("assistant\n")


def test_what_claude_code_sends(client: Client, model: ToolModel) -> None:
    asked = ASKED | {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": None}]}],
        "tools": [WEATHER | {"eager_input_streaming": True}],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    status, data, _ = client.exchange("POST", f"{PATH}?beta=true", asked, headers={"anthropic-beta": "a,b"})
    assert status == 200, data
    assert "cch=" not in model.prompt() and "system\nYou are an agent.<|im_end|>" in model.prompt()


def test_models_have_the_sdk_s_fields(sdk: anthropic.Anthropic) -> None:
    (model,) = sdk.models.list()
    checked = anthropic.types.ModelInfo.model_validate(model.model_dump())
    assert (checked.id, checked.type, checked.display_name) == (MODEL, "model", MODEL)
    assert checked.created_at.tzinfo is not None and checked.lifecycle == "active"
    assert sdk.models.retrieve(MODEL) == model


def test_count_tokens(sdk: anthropic.Anthropic) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    counted = sdk.messages.count_tokens(**asked, tools=[WEATHER], system="Be brief.")
    reply = sdk.messages.create(**ASKED, tools=[WEATHER], system="Be brief.")
    usage = reply.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 300_000}, "max_tokens"),
        ({"messages": []}, "'messages' must hold"),
        ({"messages": [{"role": "user", "content": "q " * 150_000}]}, "maximum context length"),
        ({"color": 1}, "'color'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "is an image"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
        ({"output_config": {"effort": "huge"}}, "'output_config.effort' must be one of"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_refusals(client: Client, fields: dict[str, Any], text: str) -> None:
    status, response = client.post(PATH, **(ASKED | fields))
    assert status == 400 and set(response) == {"type", "error"}, response
    assert (response["type"], response["error"]["type"]) == ("error", "invalid_request_error")
    assert text in response["error"]["message"]


def test_the_tool_runner_goes_on_without_a_thread(sdk: anthropic.Anthropic) -> None:
    """It asks for a conversation that the server holds, and sends the whole one where that is refused."""

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather."""
        return f"sunny in {city}"

    first, last = sdk.beta.messages.tool_runner(**ASKED, tools=[get_weather])
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert last.content[0].text == ANSWER


@pytest.mark.parametrize(("schema", "name"), [(MESSAGES, "thread"), (RESPONSES, "conversation")])
def test_a_conversation_that_the_server_should_have_is_never_left_out(schema: Schema[Any], name: str) -> None:
    body = json.dumps({"messages": [USER], "max_tokens": 5, "input": "x", name: {"id": "a"}, "zzz": 1})
    with pytest.raises(RequestError, match="send the whole conversation") as caught:
        schema.decode(body.encode(), lenient=True)
    assert caught.value.param == name


def test_errors_arrive_as_the_sdks_own(sdk: anthropic.Anthropic, client: Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        sdk.messages.create(**(ASKED | {"model": "other"}))
    assert caught.value.body["error"]["type"] == "not_found_error"
    status, response = client.call("GET", PATH)
    assert (status, response["type"]) == (405, "error")
