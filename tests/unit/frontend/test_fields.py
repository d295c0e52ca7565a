"""Every documented field is honoured, harmless, or refused by name: over the real app."""

import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.config.server import ServerConfig
from atom.messages.engine import AddRequest, FinishReason
from frontend.errors import RequestError
from frontend.schemas.chat import CHAT
from frontend.schemas.completions import COMPLETIONS
from frontend.schemas.fields import Schema
from tests.helpers import tiny_tokenizer
from tests.helpers.fake_core import FakeCore, Script
from tests.helpers.http_server import Client, running_frontend

SCHEMAS: dict[str, Schema[Any]] = {"chat": CHAT, "completions": COMPLETIONS}
MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
}
ASKS = {"made": "up"}  # a value that is neutral for no field


def cases(kind: str) -> list[tuple[str, str]]:
    return [
        (endpoint, name)
        for endpoint, schema in SCHEMAS.items()
        for name in sorted(schema.neutral if kind == "neutral" else schema.harmless)
    ]


@pytest.mark.parametrize(("endpoint", "name"), cases("neutral"))
def test_fields_that_are_not_honoured(endpoint: str, name: str) -> None:
    schema, body = SCHEMAS[endpoint], MINIMAL[endpoint]
    for neutral in (None, *schema.neutral[name]):
        _, warnings = schema.decode(json.dumps(body | {name: neutral}).encode(), lenient=False)
        assert warnings == []
    asking = json.dumps(body | {name: ASKS}).encode()
    with pytest.raises(RequestError, match=f"'{name}' is not supported") as caught:
        schema.decode(asking, lenient=False)
    assert (caught.value.param, caught.value.status) == (name, 400)
    _, warnings = schema.decode(asking, lenient=True)
    assert len(warnings) == 1
    assert name in warnings[0]


@pytest.mark.parametrize(("endpoint", "name"), cases("harmless"))
def test_fields_that_cannot_change_the_output(endpoint: str, name: str) -> None:
    body = json.dumps(MINIMAL[endpoint] | {name: ASKS}).encode()
    assert SCHEMAS[endpoint].decode(body, lenient=False)[1] == []


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_no_field_is_in_two_lists(schema: Schema[Any]) -> None:
    honoured = set(schema.struct.__struct_fields__)
    assert not honoured & set(schema.neutral)
    assert not honoured & schema.harmless
    assert not schema.harmless & set(schema.neutral)


def test_the_sdk_knows_no_field_that_we_do_not() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
    from openai.types.completion_create_params import CompletionCreateParamsBase

    for schema, params in ((CHAT, ChatParams), (COMPLETIONS, CompletionCreateParamsBase)):
        known = {*schema.struct.__struct_fields__, *schema.neutral, *schema.harmless}
        assert set(params.__annotations__) - known == set()


class Rig:
    """The app, and what its core received."""

    def __init__(self, client: Client, core: FakeCore):
        self.client = client
        self.core = core

    def sent(self, endpoint: str, **fields: Any) -> AddRequest:
        """The one message that a request led to."""
        self.core.requests.clear()
        status, answer = self.client.post(path(endpoint), **MINIMAL[endpoint], **fields)
        assert status == 200, answer
        return self.core.requests[0]

    def refused(self, endpoint: str, **fields: Any) -> dict[str, Any]:
        """The error object of a request that must not reach the core."""
        self.core.requests.clear()
        status, answer = self.client.post(path(endpoint), **(MINIMAL[endpoint] | fields))
        assert status == 400, answer
        assert self.core.requests == []
        assert answer["error"]["type"] == "invalid_request_error"
        error: dict[str, Any] = answer["error"]
        return error


def path(endpoint: str) -> str:
    return "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("rig")
    checkpoint = tiny_tokenizer.checkpoint(
        directory, default_sampling={"temperature": 0.6, "top_k": 20}, max_model_len=10_000
    )
    core = FakeCore(directory, lambda _: Script([70], FinishReason.MAX_TOKENS), max_model_len=10_000)
    with core, running_frontend(core, checkpoint) as client:
        yield Rig(client, core)


HONOURED: dict[str, tuple[Any, Any]] = {
    "temperature": (0, lambda sent: sent.sampling.temperature == 0),
    "top_p": (0.5, lambda sent: sent.sampling.top_p == 0.5),
    "top_k": (3, lambda sent: sent.sampling.top_k == 3),
    "min_p": (0.1, lambda sent: sent.sampling.min_p == 0.1),
    "seed": (-2, lambda sent: sent.sampling.seed == (1 << 64) - 2),
    "max_tokens": (9, lambda sent: sent.max_tokens == 9),
    "max_completion_tokens": (8, lambda sent: sent.max_tokens == 8),
    "stop_token_ids": ([9], lambda sent: sent.stop_token_ids == [9]),
    "ignore_eos": (True, lambda sent: sent.eos_token_ids == []),
    "priority": (-5, lambda sent: sent.priority == -5),
}


@pytest.mark.parametrize("endpoint", SCHEMAS)
@pytest.mark.parametrize("name", HONOURED)
def test_honoured_fields_reach_the_core(rig: Rig, endpoint: str, name: str) -> None:
    value, shows = HONOURED[name]
    assert shows(rig.sent(endpoint, **{name: value}))
    assert not shows(rig.sent(endpoint, **{name: None}))


def test_defaults(rig: Rig) -> None:
    chat, completion = rig.sent("chat"), rig.sent("completions")
    assert (chat.max_tokens, completion.max_tokens) == (8192, 256)
    assert chat.sampling.temperature == completion.sampling.temperature == 0.6
    assert (chat.sampling.top_k, chat.sampling.top_p) == (20, 1.0)


def test_the_newer_limit_wins(rig: Rig) -> None:
    assert rig.sent("chat", max_tokens=3, max_completion_tokens=4).max_tokens == 4


def test_chat_fills_what_is_left_of_the_context(rig: Rig) -> None:
    body = {"messages": [{"role": "user", "content": "hello " * 1500}]}
    status, answer = rig.client.post("/v1/chat/completions", **body)
    assert status == 200
    assert rig.core.requests[-1].max_tokens == 10_000 - answer["usage"]["prompt_tokens"] < 8192


BAD_VALUES = [
    ("temperature", -1),
    ("temperature", "warm"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("max_tokens", 0),
    ("max_tokens", 1 << 70),
    ("n", 0),
    ("n", 129),
    ("seed", 1 << 64),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 65),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [360]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("priority", 1 << 40),
]


@pytest.mark.parametrize("endpoint", SCHEMAS)
@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_bad_values_name_their_field(rig: Rig, endpoint: str, name: str, value: Any) -> None:
    error = rig.refused(endpoint, **{name: value})
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize("option", ["include_obfuscation", "continuous_usage_stats"])
def test_stream_options_that_are_not_honoured(rig: Rig, option: str) -> None:
    error = rig.refused("chat", stream=True, stream_options={option: True})
    assert error["param"] == f"stream_options.{option}"


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_unknown_fields_are_named(rig: Rig, endpoint: str) -> None:
    error = rig.refused(endpoint, zzz=1, temprature=0)
    assert error["param"] == "temprature"
    assert "'zzz'" in error["message"]


USER = {"role": "user", "content": "hi"}
BAD_MESSAGES: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", None),
    ("messages[0]", ["hi"]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0]", [{"content": "hi"}]),
    ("messages[1].colour", [USER, USER | {"colour": 1}]),
    ("messages[0].content[1]", [USER | {"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]),
    ("messages", [{"role": "forbidden", "content": "hi"}]),
]


@pytest.mark.parametrize(("param", "messages"), BAD_MESSAGES)
def test_bad_messages_name_their_place(rig: Rig, param: str, messages: Any) -> None:
    error = rig.refused("chat", messages=messages)
    assert error["param"] == param


BAD_PROMPTS: list[Any] = [
    *("", [], [[]], None, {"a": 1}),
    *([1, "a"], ["a", [1]], [1.5], [["a"]]),
    *([360], [-1], [[1], [360]]),
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_bad_prompts_are_refused(rig: Rig, prompt: Any) -> None:
    assert rig.refused("completions", prompt=prompt)["param"].startswith("prompt")


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"prompt": NaN}',
    b'{"prompt": "hi", "temperature": 1e400}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00 x"}',
    b'{"prompt": "\\ud800\\u0041"}',
    b'{"prompt": ' + b"[" * 20_000,
    b'{"metadata": ' + b"[" * 20_000,
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_bad_bodies_are_refused(rig: Rig, body: bytes) -> None:
    status, answer = rig.client.call("POST", "/v1/completions", raw=body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("a\0é", max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(
    st.sampled_from(sorted(SCHEMAS)),
    st.dictionaries(
        st.sampled_from(sorted({*CHAT.struct.__struct_fields__, "stream_options", "tools", "x"})),
        json_values,
        max_size=4,
    ),
)
def test_no_body_is_an_internal_error(rig: Rig, endpoint: str, fields: dict[str, Any]) -> None:
    status, data, _ = rig.client.exchange("POST", path(endpoint), MINIMAL[endpoint] | fields)
    assert status in (200, 400, 404), data


def test_lenient_servers_say_what_they_left_out(tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    server = ServerConfig(lenient_fields=True, default_max_tokens=33)
    with (
        FakeCore(tmp_path, lambda _: Script([70])) as core,
        running_frontend(core, checkpoint, server) as client,
    ):
        messages = [{"role": "user", "content": "hi", "mood": 1}]
        body = {"messages": messages, "logprobs": True, "zzz": 1}
        status, answer = client.post("/v1/chat/completions", **body)
        assert status == 200
        assert [text.split("'")[1] for text in answer["warnings"]] == ["logprobs", "zzz", "messages[0].mood"]
        assert core.requests[0].max_tokens == 33
        events = client.events("/v1/chat/completions", **body)
        assert all(event["warnings"] == answer["warnings"] for event in events)
        status, answer = client.post("/v1/chat/completions", messages=messages[:1], temperature="x")
        assert (status, answer["error"]["param"]) == (400, "temperature")


def test_names_with_slashes_are_found(rig: Rig) -> None:
    quoted = urllib.parse.quote("org/tiny", safe="")
    assert rig.client.call("GET", f"/v1/models/{quoted}")[1]["id"] == "org/tiny"
