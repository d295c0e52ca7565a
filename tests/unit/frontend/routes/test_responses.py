"""/v1/responses with the official client: items, events, tools, reasoning, stored responses, refusals."""

# mypy: disable-error-code="call-overload,list-item,arg-type,union-attr,index"

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from atom.shared.config.server import ServerConfig
from frontend.http.limits import HttpLimits
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

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
ASKED: dict[str, Any] = {"model": MODEL, "input": [USER], "tools": [WEATHER]}
KINDS = ["reasoning", "message", "function_call", "function_call"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolModel]:
    with running_model(tmp_path_factory.mktemp("responses")) as model:
        yield model


@pytest.fixture(scope="module")
def client(model: ToolModel) -> Iterator[Client]:
    with running_server(model) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(client: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=client.base_url, api_key="x", timeout=DEADLINE_S, max_retries=0) as sdk:
        yield sdk


def test_input_tokens_are_those_of_the_response(sdk: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "name": "answer", "schema": schema}
    first = sdk.responses.create(**ASKED)
    item = next(item for item in first.output if item.type == "function_call")
    conversations: list[dict[str, Any]] = [
        {"input": "hi"},
        {**ASKED, "instructions": "Be brief.", "tool_choice": "none", "text": {"format": form}},
        {"input": "hi", "previous_response_id": first.id, "reasoning": {"effort": "none"}},
        {
            "input": [USER, {"type": "item_reference", "id": item.id}, *results([item])],
            "tools": [{"type": "custom", "name": "run", "description": "Runs a script"}],
            "parallel_tool_calls": False,
        },
    ]
    counts = []
    for asked in conversations:
        counted = sdk.responses.input_tokens.count(**{"model": MODEL, **asked})
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == sdk.responses.create(**{"model": MODEL, **asked}).usage.input_tokens
        counts.append(counted.input_tokens)
    assert min(counts[1:]) > counts[0], counts


def test_background_is_refused_with_what_to_use(client: Client) -> None:
    status, response = client.post(PATH, input="hi", background=True)
    assert status == 400 and "use 'stream'" in response["error"]["message"]


def test_input_tokens_refuse_what_responses_refuse(client: Client) -> None:
    for fields, text in (
        ({"input": []}, "'input' must hold"),
        ({"input": "hi", "model": "other"}, "other"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "not stored"),
        ({"input": "hi", "text": {"format": {"type": "json_schema", "colour": 1}}}, "colour"),
        ({"input": "hi", "temperature": 1}, "'temperature'"),
    ):
        counted = client.post(f"{PATH}/input_tokens", **fields)
        assert counted[0] in (400, 404) and text in counted[1]["error"]["message"], counted
        if "temperature" not in fields:
            assert client.post(PATH, **fields)[0] == counted[0]


def test_input_tokens_of_a_conversation_that_is_too_long(client: Client) -> None:
    long = "q " * 150_000
    assert client.post(PATH, input=long)[0] == 400
    status, counted = client.post(f"{PATH}/input_tokens", input=long)
    assert status == 200 and counted["input_tokens"] > 300_000


def results(calls: list[Any]) -> list[dict[str, str]]:
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "20 °C"} for call in calls]


def test_a_round_trip_without_state(sdk: openai.OpenAI, model: ToolModel) -> None:
    first = sdk.responses.create(**ASKED, instructions="Be brief.", store=False)
    assert [item.type for item in first.output] == KINDS
    reasoning, message, *calls = first.output
    assert reasoning.content[0].text == REASONING and first.output_text == TEXT == message.content[0].text
    assert [call.arguments for call in calls] == ARGUMENTS and {call.name for call in calls} == {
        "get_weather"
    }
    assert first.status == "completed" and first.incomplete_details is None and first.store is False
    assert first.usage.output_tokens_details.reasoning_tokens > 2
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    assert first.tools[0].name == "get_weather" and first.instructions == "Be brief."
    assert "<|im_start|>system\nBe brief." in model.prompt()

    items = [USER, *(item.model_dump(exclude_none=True) for item in first.output), *results(calls)]
    last = sdk.responses.create(**(ASKED | {"input": items}), store=False)
    assert (last.output_text, len(last.output)) == (ANSWER, 1)
    prompt = model.prompt()
    assert f"<think>{REASONING}</think>{TEXT}<tool_call>" in prompt
    assert prompt.count("<|im_start|>assistant") == 2 and prompt.count("<tool_response>20 °C") == 2
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first.id)


def test_a_round_trip_with_state(sdk: openai.OpenAI, model: ToolModel) -> None:
    first = sdk.responses.create(**ASKED, instructions="Be brief.", metadata={"a": "b"})
    calls = [item for item in first.output if item.type == "function_call"]
    follow = {"model": MODEL, "tools": [WEATHER], "previous_response_id": first.id}
    with sdk.responses.stream(**follow, input=results(calls)) as stream:
        second = stream.until_done().get_final_response()
    assert second.output_text == ANSWER and second.previous_response_id == first.id
    prompt = model.prompt()
    assert USER["content"] in prompt and prompt.count("<tool_response>20 °C") == 2
    assert "Be brief." not in prompt  # instructions belong to one response
    third = sdk.responses.create(model=MODEL, input="Thanks.", previous_response_id=second.id)
    assert third.output_text == ANSWER
    assert f"{ANSWER}<|im_end|><|im_start|>user\nThanks." in model.prompt()

    stored = sdk.responses.retrieve(first.id)
    assert stored.model_dump() == first.model_dump() and stored.metadata == {"a": "b"}
    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.responses.create(**follow, input="x")
    assert caught.value.param == "previous_response_id"


def events_of(client: Client, **body: Any) -> list[dict[str, Any]]:
    status, data, _ = client.exchange("POST", PATH, body | {"stream": True})
    assert status == 200, data
    events = []
    for frame in data.decode().split("\n\n")[:-1]:
        event, _, payload = frame.partition("\n")
        events.append(json.loads(payload.removeprefix("data: ")))
        assert event == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_the_events_of_a_stream(client: Client, sdk: openai.OpenAI) -> None:
    events = events_of(client, **ASKED)
    kinds = [event["type"].removeprefix("response.") for event in events]
    short = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    part = ["content_part.added", "{0}.delta", "{0}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    expected = ["created", "in_progress", "output_item.added"]
    expected += [kind.format("reasoning_text") for kind in part] + ["output_item.added"]
    expected += [kind.format("output_text") for kind in part]
    expected += [*call, "output_item.done", *call, "output_item.done", "completed"]
    assert short == expected
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    with sdk.responses.stream(**ASKED) as stream:
        stream.until_done()
        final = stream.get_final_response()
    assert [item.type for item in final.output] == KINDS


def test_every_cut_of_a_stream(client: Client) -> None:
    """Whatever ends by length, and wherever updates are cut: deltas join to the items of the response."""
    for limit in range(1, 120, 7):
        asked = ASKED | {"max_output_tokens": limit, "store": False}
        _, whole = client.post(PATH, **asked)
        texts: dict[str, str] = {}
        events = events_of(client, **asked)
        for event in events:
            if event["type"].endswith(".delta"):
                texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        last = events[-1]["response"]
        assert events[-1]["type"] == f"response.{last['status']}" and last["status"] == whole["status"]
        assert last["incomplete_details"] == whole["incomplete_details"]
        assert last["usage"] == whole["usage"]
        for item in last["output"]:
            text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
            assert texts.get(item["id"], "") == text
        if last["status"] == "incomplete":
            assert [item["status"] for item in last["output"]][-1:] in ([], ["incomplete"])
        for kind in ("function_call", "reasoning"):
            ours, theirs = ([i for i in r["output"] if i["type"] == kind] for r in (last, whole))
            assert [i.get("arguments", i.get("content")) for i in ours] == [
                i.get("arguments", i.get("content")) for i in theirs
            ]


def test_reasoning_for_clients_that_keep_no_text(sdk: openai.OpenAI, model: ToolModel) -> None:
    first = sdk.responses.create(**ASKED, include=["reasoning.encrypted_content"], store=False)
    opaque = first.output[0].encrypted_content
    assert base64.b64decode(opaque).decode() == REASONING
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": opaque}
    calls = [item.model_dump(exclude_none=True) for item in first.output[2:]]
    items = [USER, reasoning, *calls, *results(first.output[2:])]
    sdk.responses.create(**(ASKED | {"input": items}), store=False)
    assert f"<think>{REASONING}</think><tool_call>" in model.prompt()


def test_what_codex_sends(client: Client, model: ToolModel) -> None:
    developer = {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "Rules."}],
    }
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    asked = {
        "model": MODEL,
        "instructions": "You are Codex.",
        "input": [developer, user],
        "tools": [
            WEATHER,
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0197",
        "client_metadata": {"x-codex-installation-id": "1"},
        "text": {"verbosity": "medium"},
    }
    events = events_of(client, **asked)
    assert events[-1]["type"] == "response.completed"
    assert len(events[-1]["response"]["warnings"]) == 2
    assert [item["type"] for item in events[-1]["response"]["output"]].count("function_call") == 1
    assert "<|im_start|>system\nYou are Codex.\n\nRules.<|im_end|>" in model.prompt()


def test_references_to_stored_items(client: Client, model: ToolModel) -> None:
    """As the `ai` package sends them."""
    _, first = client.post(PATH, **ASKED)
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "20 °C"}
        for item in first["output"][2:]
    ]
    status, last = client.post(PATH, **(ASKED | {"input": [USER, *references, *outputs]}))
    assert status == 200 and last["output"][0]["content"][0]["text"] == ANSWER
    assert f"<think>{REASONING}</think>{TEXT}<tool_call>" in model.prompt()
    client.call("DELETE", f"{PATH}/{first['id']}")  # what was referred to is part of what is kept
    assert client.post(PATH, input="x", previous_response_id=last["id"])[0] == 200
    assert f"<think>{REASONING}</think>{TEXT}<tool_call>" in model.prompt()
    for wrong in (references[0]["id"], "", "_", "msg_x", last["output"][0]["id"][:-1] + "9", "\u0663"):
        status, refused = client.post(PATH, input=[{"type": "item_reference", "id": wrong}])
        assert status in (400, 404) and refused["error"]["param"] == "input[0]", wrong
        assert status == 400 or f"the item {wrong!r}" in refused["error"]["message"]


def test_a_conversation_with_stored_items_is_bounded_as_a_body_is(model: ToolModel) -> None:
    with running_server(model, limits=HttpLimits(max_body_bytes=4096)) as client:
        _, first = client.post(PATH, **ASKED)
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        assert client.post(PATH, input=[USER, reference])[0] == 200
        status, refused = client.post(PATH, input=[reference] * 40)
        assert status == 413 and "stored items" in refused["error"]["message"]
        last = client.post(PATH, input="x" * 3000)[1]["id"]
        assert client.post(PATH, input="x", previous_response_id=last)[0] == 200
        assert client.post(PATH, input="x" * 3000, previous_response_id=last)[0] == 413


CUSTOM: dict[str, Any] = {
    "type": "custom",
    "name": "get_weather",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_are_allowed(client: Client, model: ToolModel, mode: str) -> None:
    tools = [WEATHER, WEATHER | {"name": "get_rain"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "get_weather"}]}
    status, response = client.post(PATH, **ASKED | {"tools": tools, "tool_choice": choice})
    assert status == 200 and response["tool_choice"] == choice
    assert "get_rain" in model.prompt() and model.core.requests[-1].grammar is not None


def test_custom_tools_have_a_text_as_input(client: Client, model: ToolModel) -> None:
    asked = ASKED | {"tools": [CUSTOM], "store": False}
    _, whole = client.post(PATH, **asked)
    events = events_of(client, **asked)
    assert any("format" in warning for warning in whole["warnings"])
    assert '"required": ["input"]' in model.prompt()
    for output in (whole["output"], events[-1]["response"]["output"]):
        calls = [item for item in output if item["type"] == "custom_tool_call"]
        assert [call["input"] for call in calls] == ARGUMENTS  # the model wrote other arguments
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ARGUMENTS
    assert not [event for event in events if "function_call_arguments" in event["type"]]
    call = {"type": "custom_tool_call", "call_id": "a", "name": "get_weather", "input": "Paris"}
    result = {"type": "custom_tool_call_output", "call_id": "a", "output": "20 °C"}
    client.post(PATH, **(asked | {"input": [USER, call, result]}))
    assert '"arguments": {"input": "Paris"}' in model.prompt() and "20 °C" in model.prompt()


def test_the_input_of_a_stored_response_is_listed(sdk: openai.OpenAI, client: Client) -> None:
    """Page by page, with earlier responses, and with parts and ids where clients had left them out."""
    first = sdk.responses.create(model=MODEL, input=[{"id": "msg_own", **USER}, {**USER, "content": "And?"}])
    second = sdk.responses.create(model=MODEL, input="Thanks.", previous_response_id=first.id)
    listed = sdk.responses.input_items.list
    items = list(listed(second.id, limit=2, order="asc"))
    assert [items[0].id, items[2].id] == ["msg_own", first.output[0].id] and len(items) == 4
    assert len({item.id for item in items}) == 4 and {item.status for item in items} == {"completed"}
    kinds = [item.content[0].type for item in items]
    assert kinds == ["input_text", "input_text", "output_text", "input_text"]
    assert [items[1].content[0].text, items[3].content[0].text] == ["And?", "Thanks."]
    assert [item.id for item in listed(second.id)] == [item.id for item in reversed(items)]
    assert [item.id for item in listed(first.id, after=items[0].id, order="asc")] == [
        listed(first.id).data[0].id
    ]
    path = f"{PATH}/{first.id}/input_items"
    body = b'{"input": [{"role": "user", "content": "x", "id": "\xff"}]}'
    status, data, _ = client.exchange("POST", PATH, raw=body)
    assert status == 200
    assert listed(json.loads(data)["id"]).data[0].id == "\ufffd"
    assert client.call("GET", f"{PATH}/resp_1/input_items")[0] == 404
    for query, param in (
        ("limit=0", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
        ("page=1", "page"),
    ):
        status, refused = client.call("GET", f"{path}?{query}")
        assert (status, refused["error"]["param"]) == (400, param)


def test_stored_responses_are_bounded_and_belong_to_one_key(model: ToolModel) -> None:
    server = ServerConfig(max_stored_response_bytes=8192, api_key="one,two")
    with running_server(model, server) as client:

        def call(method: str, path: str, body: Any = None, key: str = "one") -> tuple[int, Any]:
            status, data, _ = client.exchange(method, path, body, headers={"x-api-key": key})
            return status, json.loads(data)

        ids = [call("POST", PATH, {"input": f"number {index}"})[1]["id"] for index in range(8)]
        found = [call("GET", f"{PATH}/{each}")[0] for each in ids]
        assert found[0] == 404 and found[-1] == 200 and sorted(found, reverse=True) == found
        assert call("GET", f"{PATH}/{ids[-1]}", key="two")[0] == 404
        assert call("POST", PATH, {"input": "x", "previous_response_id": ids[-1]}, key="two")[0] == 404
        assert call("POST", PATH, {"input": "x", "previous_response_id": ids[-1]})[0] == 200


@pytest.mark.parametrize(
    ("server", "processes", "text"),
    [
        (ServerConfig(), 2, "--api-server-count 1"),
        (ServerConfig(max_stored_response_bytes=0), 1, "--max-stored"),
    ],
)
def test_where_nothing_is_stored(model: ToolModel, server: ServerConfig, processes: int, text: str) -> None:
    with running_server(model, server, num_frontends=processes) as client:
        status, made = client.post(PATH, input="x")
        assert status == 200 and made["store"] is False
        for status, response in (
            client.post(PATH, input="x", previous_response_id=made["id"]),
            client.call("GET", f"{PATH}/{made['id']}"),
        ):
            assert status == 400 and text in response["error"]["message"]


def test_a_refused_item_or_part_names_those_that_are_taken(client: Client) -> None:
    for given, taken in (
        ({"type": "web_search_call"}, "item_reference"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input_image"),
    ):
        status, response = client.post(PATH, **(ASKED | {"input": [given]}))
        assert status == 400 and taken in response["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"color": 1}, "color"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "reasoning", "encrypted_content": "%"}]}, "input[0].encrypted_content"),
        ({"input": [{"role": "bot", "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [WEATHER]}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice.tools",
        ),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 300_000}, "max_output_tokens"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            {"stream_options": {"include_obfuscation": True}, "stream": True},
            "stream_options.include_obfuscation",
        ),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "x")}, "metadata"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
def test_refusals(client: Client, fields: dict[str, Any], param: str) -> None:
    status, response = client.post(PATH, **(ASKED | fields))
    assert status in (400, 404) and response["error"]["param"] == param, response
    assert response["error"]["message"].count("max_tokens") == 0


def test_cancel_is_refused_and_an_unknown_stream_is_not_found(client: Client) -> None:
    assert client.post(f"{PATH}/resp_1/cancel")[0] == 400
    assert client.call("GET", f"{PATH}/resp_1?stream=true")[1]["error"]["code"] == "stream_not_found"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=1", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=false&starting_after=3", "starting_after"),
        ("starting-after=3", "starting-after"),
        ("include_obfuscation=true", "include_obfuscation"),
    ],
)
def test_no_parameter_of_a_stored_response_is_ignored(
    client: Client, sdk: openai.OpenAI, query: str, param: str
) -> None:
    made = sdk.responses.create(**ASKED)
    status, data, _ = client.exchange("GET", f"{PATH}/{made.id}?{query}")
    assert status == 400 and json.loads(data)["error"]["param"] == param
    assert sdk.responses.retrieve(made.id, include=["reasoning.encrypted_content"]).id == made.id
