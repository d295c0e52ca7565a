"""Every field of /v1/responses and /v1/messages has the effect that the documentation says, or is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from atom.messages.engine import AddRequest
from frontend.schemas.fields import Schema
from frontend.schemas.messages import MESSAGES
from frontend.schemas.responses import RESPONSES
from tests.helpers.http_server import MODEL, Client
from tests.helpers.tool_model import USER, ToolModel, running_model, running_server

Shows = Callable[[AddRequest, dict[str, Any]], bool]

SCHEMAS: dict[str, Schema[Any]] = {"/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
BASES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 64},
}
BOTH: dict[str, tuple[Any, Shows]] = {
    "temperature": (0.25, lambda sent, _: sent.sampling.temperature == 0.25),
    "top_p": (0.5, lambda sent, _: sent.sampling.top_p == 0.5),
    "top_k": (7, lambda sent, _: sent.sampling.top_k == 7),
    "min_p": (0.25, lambda sent, _: sent.sampling.min_p == 0.25),
    "seed": (9, lambda sent, _: sent.sampling.seed == 9),
    "priority": (3, lambda sent, _: sent.priority == 3),
    "cache_salt": ("pepper", lambda sent, _: len(sent.cache_salt) == 64),
    "request_id": ("my-id.7", lambda _, response: response["id"].endswith("_my-id.7")),
    "model": (MODEL, lambda _, response: response["model"] == MODEL),
}


def processors(sent: AddRequest) -> Any:
    return sent.sampling.logits_processors


ONLY: dict[str, dict[str, tuple[Any, Shows]]] = {
    "/v1/responses": {
        "max_output_tokens": (
            3,
            lambda sent, response: sent.max_tokens == response["max_output_tokens"] == 3,
        ),
        "stop": ("sun", lambda _, response: response["output"][0]["content"][0]["text"] == "It is "),
        "stop_token_ids": ([5], lambda sent, _: sent.stop_token_ids == [5]),
        "ignore_eos": (True, lambda sent, _: not sent.eos_token_ids),
        "min_tokens": (2, lambda sent, _: processors(sent) is not None and processors(sent).min_tokens == 2),
        "presence_penalty": (0.5, lambda sent, _: getattr(processors(sent), "presence_penalty", 0) == 0.5),
        "frequency_penalty": (0.5, lambda sent, _: getattr(processors(sent), "frequency_penalty", 0) == 0.5),
        "repetition_penalty": (2, lambda sent, _: getattr(processors(sent), "repetition_penalty", 1) == 2),
        "metadata": ({"a": "b"}, lambda _, response: response["metadata"] == {"a": "b"}),
        "instructions": ("Be brief.", lambda _, response: response["instructions"] == "Be brief."),
        "store": (False, lambda _, response: response["store"] is False),
        "reasoning": ({"effort": "high"}, lambda _, response: response["reasoning"]["effort"] == "high"),
    },
    "/v1/messages": {
        "max_tokens": (3, lambda sent, response: sent.max_tokens == 3 == response["usage"]["output_tokens"]),
        "stop_sequences": (["sun"], lambda _, response: response["stop_sequence"] == "sun"),
    },
}
# In test_responses and test_anthropic.
ELSEWHERE = {
    "/v1/responses": {
        *("include", "input", "parallel_tool_calls", "previous_response_id", "stream", "stream_options"),
        *("text", "tool_choice", "tools"),
    },
    "/v1/messages": {
        *("context_management", "messages", "output_config", "stream", "system", "thinking", "tool_choice"),
        "tools",
    },
}
RANK = {"data_parallel_rank"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolModel]:
    with running_model(tmp_path_factory.mktemp("fields")) as model:
        yield model


@pytest.fixture(scope="module")
def client(model: ToolModel) -> Iterator[Client]:
    with running_server(model) as client:
        yield client


@pytest.mark.parametrize("path", SCHEMAS)
def test_the_table_is_complete(path: str) -> None:
    schema = SCHEMAS[path]
    assert {*BOTH, *ONLY[path], *ELSEWHERE[path], *RANK} == set(schema.struct.__struct_fields__)
    assert not schema.harmless & {*schema.neutral, *schema.struct.__struct_fields__}
    assert not set(schema.neutral) & set(schema.struct.__struct_fields__)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path in SCHEMAS for name in BOTH | ONLY[path]])
def test_fields_have_an_effect(client: Client, model: ToolModel, path: str, name: str) -> None:
    value, shows = (BOTH | ONLY[path])[name]
    status, response = client.post(path, **(BASES[path] | {name: value}))
    assert status == 200, response
    assert shows(model.core.requests[-1], response)
    if name not in ("model", "max_tokens"):
        status, response = client.post(path, **(BASES[path] | {name: None}))
        assert status == 200 and not shows(model.core.requests[-1], response)


@pytest.mark.parametrize("path", SCHEMAS)
def test_other_fields_are_refused_by_name_or_harmless(client: Client, path: str) -> None:
    def message(**fields: Any) -> tuple[int, str]:
        status, response = client.post(path, **(BASES[path] | fields))
        return status, response["error"]["message"] if status != 200 else ""

    for name in (*SCHEMAS[path].neutral, "temperatur"):
        status, text = message(**{name: {"an": "odd value"}})
        assert status == 400 and f"'{name}'" in text
        assert message(**{name: None})[0] == 200
    status, text = message(data_parallel_rank=5)
    assert status == 400 and "rank" in text
    harmless: Any = dict.fromkeys(SCHEMAS[path].harmless, "x") | {"metadata": {"user_id": "x"}}
    assert message(**harmless)[0] == 200


@pytest.mark.parametrize("path", SCHEMAS)
def test_the_fields_of_the_clients_are_known(path: str) -> None:
    from anthropic.types.message_create_params import MessageCreateParamsBase
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    params = {"/v1/responses": ResponseCreateParamsBase, "/v1/messages": MessageCreateParamsBase}
    schema = SCHEMAS[path]
    known = {*schema.struct.__struct_fields__, *schema.neutral, *schema.harmless}
    assert set(params[path].__annotations__) - known == set()
