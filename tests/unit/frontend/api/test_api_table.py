"""Responses, messages and tokenization, field by field: its effect, its neutral values, its refusal.

The tables of chat and completions are in test_fields.py. `docs/use/api.md` shows all of them.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

from atom.shared.messages.engine import AddRequest, LogitsProcessors
from frontend.api.messages.schema import COUNT, MESSAGES
from frontend.api.responses.schema import INPUT_TOKENS, RESPONSES
from frontend.api.schemas.fields import Schema
from frontend.api.tokenization.schema import DETOKENIZE, TOKENIZE
from tests.helpers.servers.http_server import MODEL, Client, running_frontend
from tests.helpers.servers.tool_model import ToolModel, running_model

USER = {"role": "user", "content": "hi"}
SCHEMAS: dict[str, Schema[Any]] = {
    "responses": RESPONSES,
    "input_tokens": INPUT_TOKENS,
    "messages": MESSAGES,
    "count_tokens": COUNT,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
}
PATHS = {
    "responses": "/v1/responses",
    "input_tokens": "/v1/responses/input_tokens",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
BOS = 0
BASE = 19
"""Tokens of the conversation in MINIMAL."""
MINIMAL: dict[str, dict[str, Any]] = {
    "responses": {"input": "hi"},
    "input_tokens": {"input": "hi"},
    "messages": {"messages": [USER], "max_tokens": 100},
    "count_tokens": {"messages": [USER]},
    "tokenize": {"messages": [USER]},
    "detokenize": {"tokens": [70, 71]},
}


@dataclass
class Ran:
    """What a request did."""

    requests: list[AddRequest]
    status: int
    response: Any
    prompt: str

    @property
    def sent(self) -> AddRequest:
        return self.requests[0]

    @property
    def processors(self) -> LogitsProcessors:
        return self.sent.sampling.logits_processors or LogitsProcessors()


class Row(NamedTuple):
    """A value, its effect, further fields that it needs, and whether it also holds without the field."""

    value: Any
    shows: Callable[[Ran], bool]
    others: dict[str, Any] = {}
    always: bool = False


def kinds(ran: Ran) -> list[str]:
    """Kinds of the parts of the output."""
    return [part["type"] for part in ran.response.get("output") or ran.response["content"]]


SAMPLING: dict[str, Row] = {
    "temperature": Row(0.5, lambda ran: ran.sent.sampling.temperature == 0.5),
    "top_p": Row(0.5, lambda ran: ran.sent.sampling.top_p == 0.5),
    "top_k": Row(3, lambda ran: ran.sent.sampling.top_k == 3),
    "min_p": Row(0.1, lambda ran: ran.sent.sampling.min_p == 0.1),
    "seed": Row(7, lambda ran: ran.sent.sampling.seed == 7),
    "priority": Row(-5, lambda ran: ran.sent.priority == -5),
    "data_parallel_rank": Row(0, lambda ran: ran.status == 200, always=True),
    "cache_salt": Row("pepper", lambda ran: len(ran.sent.cache_salt) == 64),
    "request_id": Row("my-id.7", lambda ran: ran.response["id"].endswith("my-id.7")),
    "model": Row(MODEL, lambda ran: ran.response["model"] == MODEL, always=True),
    "stream": Row(True, lambda ran: isinstance(ran.response, bytes)),
}
OPENAI_TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
ANTHROPIC_TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
ENCRYPTED = ["reasoning.encrypted_content"]

TABLE: dict[str, dict[str, Row]] = {
    "responses": SAMPLING
    | {
        "input": Row([{"role": "user", "content": "bonjour"}], lambda ran: "bonjour" in ran.prompt),
        "instructions": Row("Be brief.", lambda ran: "system\nBe brief." in ran.prompt),
        "previous_response_id": Row("STORED", lambda ran: ran.prompt.count("user\n") == 2),
        "store": Row(False, lambda ran: ran.response["store"] is False),
        "tools": Row([OPENAI_TOOL], lambda ran: "function_call" in kinds(ran)),
        "tool_choice": Row("none", lambda ran: "function_call" not in kinds(ran), {"tools": [OPENAI_TOOL]}),
        "parallel_tool_calls": Row(
            False, lambda ran: kinds(ran).count("function_call") == 1, {"tools": [OPENAI_TOOL]}
        ),
        "reasoning": Row({"effort": "none"}, lambda ran: ran.prompt.endswith("<think>\n\n</think>\n\n")),
        "text": Row({"format": {"type": "text"}}, lambda ran: ran.status == 200, always=True),
        "include": Row(
            ENCRYPTED,
            lambda ran: any(part.get("encrypted_content") for part in ran.response["output"]),
            {"tools": [OPENAI_TOOL]},
        ),
        "metadata": Row({"a": "b"}, lambda ran: ran.response["metadata"] == {"a": "b"}),
        "max_output_tokens": Row(2, lambda ran: ran.sent.max_tokens == 2),
        "stream_options": Row(
            {"include_obfuscation": False}, lambda ran: ran.status == 200, {"stream": True}, always=True
        ),
        "stop": Row(["sunny"], lambda ran: "sunny" not in json.dumps(ran.response["output"])),
        "stop_token_ids": Row([9], lambda ran: ran.sent.stop_token_ids == [9]),
        "ignore_eos": Row(True, lambda ran: ran.sent.eos_token_ids == []),
        "min_tokens": Row(3, lambda ran: ran.processors.min_tokens == 3),
        "presence_penalty": Row(-2, lambda ran: ran.processors.presence_penalty == -2),
        "frequency_penalty": Row(0.5, lambda ran: ran.processors.frequency_penalty == 0.5),
        "repetition_penalty": Row(1.1, lambda ran: ran.processors.repetition_penalty == 1.1),
    },
    "input_tokens": {
        "model": Row(MODEL, lambda ran: ran.status == 200, always=True),
        "input": Row("longer " * 9, lambda ran: count(ran) > BASE),
        "instructions": Row("Be brief.", lambda ran: count(ran) > BASE),
        "previous_response_id": Row("STORED", lambda ran: count(ran) > BASE),
        "tools": Row([OPENAI_TOOL], lambda ran: count(ran) > BASE),
        "tool_choice": Row("auto", lambda ran: count(ran) > BASE, {"tools": [OPENAI_TOOL]}, always=True),
        "parallel_tool_calls": Row(False, lambda ran: ran.status == 200, always=True),
        "reasoning": Row({"effort": "none"}, lambda ran: count(ran) > BASE),
        "text": Row({"format": {"type": "text"}}, lambda ran: ran.status == 200, always=True),
    },
    "messages": SAMPLING
    | {
        "messages": Row([{"role": "user", "content": "bonjour"}], lambda ran: "bonjour" in ran.prompt),
        "max_tokens": Row(2, lambda ran: ran.sent.max_tokens == 2),
        "system": Row("Be brief.", lambda ran: "system\nBe brief." in ran.prompt),
        "tools": Row([ANTHROPIC_TOOL], lambda ran: "tool_use" in kinds(ran)),
        "tool_choice": Row(
            {"type": "none"}, lambda ran: "tool_use" not in kinds(ran), {"tools": [ANTHROPIC_TOOL]}
        ),
        "thinking": Row({"type": "disabled"}, lambda ran: ran.prompt.endswith("</think>\n\n")),
        "output_config": Row({"effort": "none"}, lambda ran: ran.status == 200, always=True),
        "context_management": Row(
            {"edits": [{"type": "clear_thinking_20251015"}]}, lambda ran: ran.status == 200, always=True
        ),
        "stop_sequences": Row(["sunny"], lambda ran: ran.response["stop_sequence"] == "sunny"),
    },
    "count_tokens": {
        "model": Row(MODEL, lambda ran: ran.status == 200, always=True),
        "messages": Row([{"role": "user", "content": "longer " * 9}], lambda ran: count(ran) > BASE),
        "system": Row("Be brief.", lambda ran: count(ran) > BASE),
        "tools": Row([ANTHROPIC_TOOL], lambda ran: count(ran) > BASE),
        "tool_choice": Row(
            {"type": "auto"}, lambda ran: count(ran) > BASE, {"tools": [ANTHROPIC_TOOL]}, always=True
        ),
        "thinking": Row({"type": "disabled"}, lambda ran: count(ran) > BASE),
        "output_config": Row({"effort": "none"}, lambda ran: ran.status == 200, always=True),
        "context_management": Row({"edits": []}, lambda ran: ran.status == 200, always=True),
    },
    "tokenize": {
        "model": Row(MODEL, lambda ran: ran.status == 200, always=True),
        "prompt": Row("hello", lambda ran: 0 < num_tokens(ran) < 8, {"messages": None}, always=True),
        "messages": Row([{"role": "user", "content": "longer " * 9}], lambda ran: num_tokens(ran) > BASE),
        "add_special_tokens": Row(True, lambda ran: ran.response["tokens"][0] == BOS),
        "return_token_strs": Row(True, lambda ran: "hi" in "".join(ran.response["token_strs"] or [])),
        "add_generation_prompt": Row(False, lambda ran: num_tokens(ran) < BASE),
        "continue_final_message": Row(
            True,
            lambda ran: num_tokens(ran) > 3,
            {"messages": [USER, {"role": "assistant", "content": "So"}], "add_generation_prompt": False},
            always=True,
        ),
        "chat_template_kwargs": Row({"enable_thinking": False}, lambda ran: num_tokens(ran) > BASE),
        "tools": Row(
            [{"type": "function", "function": {"name": "look", "parameters": {}}}],
            lambda ran: num_tokens(ran) > BASE,
        ),
    },
    "detokenize": {
        "model": Row(MODEL, lambda ran: ran.status == 200, always=True),
        "tokens": Row([70], lambda ran: len(ran.response["prompt"]) == 1),
    },
}

REFUSED: dict[str, dict[str, Any]] = {
    "responses": {
        "background": True,
        "context_management": [{"type": "compaction"}],
        "access_programs": {"cyber": "standard"},
        "conversation": "conv_1",
        "image": {"context_compression": "auto"},
        "moderation": {"x": 1},
        "prompt": {"id": "p"},
        "top_logprobs": 2,
        "truncation": "auto",
    },
    "input_tokens": {"conversation": "conv_1", "personality": "friendly", "truncation": "auto"},
    "messages": {
        "mcp_servers": [{"name": "x"}],
        "speed": "fast",
        "container": "c",
        "thread": {"type": "create"},
    },
    "tokenize": {"chat_template": "x", "mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": 1}},
    "detokenize": {},
}
REFUSED["count_tokens"] = REFUSED["messages"]


def count(ran: Ran) -> int:
    number: int = ran.response["input_tokens"]
    return number


def num_tokens(ran: Ran) -> int:
    number: int = ran.response["count"]
    return number


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolModel]:
    with running_model(tmp_path_factory.mktemp("table")) as model:
        yield model


@pytest.fixture(scope="module")
def client(model: ToolModel) -> Iterator[Client]:
    checkpoint = replace(model.checkpoint, add_bos_token=True)
    with running_frontend(model.core, checkpoint) as client:
        yield client


def run(client: Client, model: ToolModel, endpoint: str, /, **fields: Any) -> Ran:
    """The effect of a request; None leaves a field of the minimal request out."""
    model.core.requests.clear()
    body = {name: value for name, value in (MINIMAL[endpoint] | fields).items() if value is not None}
    if body.get("previous_response_id") == "STORED":
        body["previous_response_id"] = client.post(PATHS["responses"], **MINIMAL["responses"])[1]["id"]
        model.core.requests.clear()
    status, data, _ = client.exchange("POST", PATHS[endpoint], body)
    response = data if body.get("stream") and status == 200 else json.loads(data)
    requests = list(model.core.requests)
    return Ran(requests, status, response, model.prompt() if requests else "")


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_the_table_is_complete(endpoint: str) -> None:
    schema = SCHEMAS[endpoint]
    assert set(TABLE[endpoint]) == set(schema.struct.__struct_fields__)
    assert set(REFUSED[endpoint]) == set(schema.neutral)
    assert not schema.harmless & {*schema.neutral, *schema.struct.__struct_fields__}


@pytest.mark.parametrize(
    ("endpoint", "name"), [(endpoint, name) for endpoint in TABLE for name in TABLE[endpoint]]
)
def test_supported_fields_have_their_effect(
    client: Client, model: ToolModel, endpoint: str, name: str
) -> None:
    row = TABLE[endpoint][name]
    ran = run(client, model, endpoint, **{**row.others, name: row.value})
    assert ran.status == 200, ran.response
    assert row.shows(ran)
    if not row.always and name not in MINIMAL[endpoint]:
        without = run(client, model, endpoint, **row.others)
        assert without.status == 200 and not row.shows(without)


@pytest.mark.parametrize(
    ("endpoint", "name"), [(endpoint, name) for endpoint in REFUSED for name in REFUSED[endpoint]]
)
def test_refused_fields_are_named_and_neutral_values_accepted(
    client: Client, model: ToolModel, endpoint: str, name: str
) -> None:
    refused = run(client, model, endpoint, **{name: REFUSED[endpoint][name]})
    assert refused.status == 400 and not refused.requests
    assert f"'{name}' is not supported" in refused.response["error"]["message"]
    for neutral in SCHEMAS[endpoint].neutral[name]:
        assert run(client, model, endpoint, **{name: neutral}).status == 200


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_harmless_fields_change_nothing(client: Client, model: ToolModel, endpoint: str) -> None:
    fields = {name: {"any": "thing"} for name in SCHEMAS[endpoint].harmless}
    plain, ran = run(client, model, endpoint), run(client, model, endpoint, **fields)
    assert ran.status == 200, ran.response
    assert [one.prompt_ids for one in ran.requests] == [one.prompt_ids for one in plain.requests]


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_misspelt_fields_are_named(client: Client, model: ToolModel, endpoint: str) -> None:
    ran = run(client, model, endpoint, temprature=1)
    assert ran.status == 400 and "'temprature'" in ran.response["error"]["message"]


def test_all_fields_of_the_clients_are_known() -> None:
    from anthropic.types.message_count_tokens_params import MessageCountTokensParams
    from anthropic.types.message_create_params import MessageCreateParamsBase
    from openai.types.responses.input_token_count_params import InputTokenCountParams
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    params = {
        "responses": ResponseCreateParamsBase,
        "input_tokens": InputTokenCountParams,
        "messages": MessageCreateParamsBase,
        "count_tokens": MessageCountTokensParams,
    }
    for name, fields in params.items():
        schema = SCHEMAS[name]
        known = {*schema.struct.__struct_fields__, *schema.neutral, *schema.harmless}
        assert set(fields.__annotations__) - known == set()
