"""Invalid requests get a 400 that names the field, and never reach the engine."""

import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontend.api.chat.schema import CHAT
from frontend.api.completions.schema import COMPLETIONS
from tests.helpers.servers.rig import MINIMAL, PATHS, Rig, running_rig

ENDPOINTS = ("chat", "completions")
HUGE = 1 << 70


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running_rig(tmp_path_factory.mktemp("rig")) as rig:
        yield rig


BAD_VALUES: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", "warm"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("max_tokens", 0),
    ("max_tokens", HUGE),
    ("n", 0),
    ("n", 129),
    ("seed", 1 << 64),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 65),
    ("stop", ["a" * 1025]),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [360]),
    ("stop_token_ids", [HUGE]),
    ("stop_token_ids", [5] * 1025),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("priority", 1 << 40),
    ("data_parallel_rank", 1),
    ("data_parallel_rank", -1),
    ("data_parallel_rank", HUGE),
    ("data_parallel_rank", "first"),
    ("presence_penalty", 2.1),
    ("presence_penalty", "much"),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"five": 1}),
    ("logit_bias", {"-5": 1}),
    ("logit_bias", {"360": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"5": None}),
    ("logit_bias", {"5": 10**400}),
    ("logit_bias", {str(i): 0 for i in range(1025)}),
    ("logit_bias", [1]),
    ("min_tokens", -1),
    ("min_tokens", 9000),
    ("bad_words", [""]),
    ("bad_words", ["  "]),
    ("bad_words", ["a" * 257]),
    ("bad_words", ["a"] * 257),
    ("bad_words", "word"),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [360]),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", ["5"]),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", True),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", 10_001),
    ("truncation_side", "left"),
    ("truncation_side", "middle"),
    ("cache_salt", ""),
    ("cache_salt", "a" * 1025),
    ("cache_salt", 5),
    ("request_id", ""),
    ("request_id", "a b"),
    ("request_id", "a\n"),
    ("request_id", "a" * 129),
    ("skip_special_tokens", 1),
    ("include_stop_str_in_output", "yes"),
    ("return_token_ids", 1),
]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_bad_values_name_their_field(rig: Rig, endpoint: str, name: str, value: Any) -> None:
    error = rig.refused(endpoint, **{name: value})
    assert error["param"].partition("[")[0] == name
    assert name in error["message"]


BAD_COMBINATIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "top_logprobs", {"top_logprobs": 2}),
    ("chat", "top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ("chat", "top_logprobs", {"top_logprobs": -1, "logprobs": True}),
    ("chat", "logprobs", {"logprobs": 3}),
    ("chat", "continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    ("chat", "chat_template_kwargs", {"chat_template_kwargs": {"tone": "a" * (1 << 16)}}),
    ("chat", "chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
    ("chat", "chat_template_kwargs.tokenize", {"chat_template_kwargs": {"tokenize": True}}),
    ("chat", "chat_template_kwargs.bos_token", {"chat_template_kwargs": {"bos_token": "x"}}),
    ("chat", "reasoning_effort", {"reasoning_effort": "immense"}),
    ("chat", "max_tokens", {"max_tokens": 0, "echo": True}),
    ("completions", "logprobs", {"logprobs": 21}),
    ("completions", "logprobs", {"logprobs": -1}),
    ("completions", "logprobs", {"logprobs": True}),
    ("completions", "best_of", {"best_of": 2}),
    ("completions", "best_of", {"best_of": 1, "n": 2}),
    ("completions", "min_tokens", {"min_tokens": 2, "max_tokens": 0, "echo": True}),
    ("completions", "prompt_logprobs", {"prompt": [5] * 9000, "prompt_logprobs": 20, "n": 6}),
    ("completions", "logprobs", {"prompt": [[5] * 9000] * 58, "echo": True, "logprobs": 2}),
    ("completions", "n", {"prompt": ["a"] * 9, "n": 120}),
    ("completions", "allowed_token_ids", {"allowed_token_ids": [1], "min_tokens": 1}),
    ("chat", "allowed_token_ids", {"allowed_token_ids": [1, 9], "min_tokens": 1, "stop_token_ids": [9]}),
    (
        "chat",
        "stream_options.include_obfuscation",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
    ),
    ("chat", "prompt_logprobs", {"stream": True, "prompt_logprobs": 0}),
    ("completions", "prompt_logprobs", {"stream": True, "prompt_logprobs": 0, "echo": True}),
]


@pytest.mark.parametrize(("endpoint", "param", "fields"), BAD_COMBINATIONS, ids=range(len(BAD_COMBINATIONS)))
def test_bad_combinations_name_a_field(rig: Rig, endpoint: str, param: str, fields: dict[str, Any]) -> None:
    assert rig.refused(endpoint, **fields)["param"] == param


@pytest.mark.parametrize("endpoint", ENDPOINTS)
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
    ("messages[0].role", [{"content": "hi"}]),
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
    *([360], [-1], [[1], [360]], [HUGE], [[HUGE]]),
]


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_bad_prompts_are_refused(rig: Rig, prompt: Any, echo: bool) -> None:
    assert rig.refused("completions", prompt=prompt, echo=echo, logprobs=1)["param"].startswith("prompt")


def test_prompts_beyond_the_context_are_refused_with_both_numbers(rig: Rig) -> None:
    error = rig.refused("completions", prompt=[5] * 9_999, max_tokens=2)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "10000" in error["message"]
    assert "10001" in error["message"]
    error = rig.refused("chat", messages=[USER | {"content": "q" * 20_000}])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_a_field_that_is_missing_is_named(rig: Rig) -> None:
    status, response = rig.client.call("POST", "/detokenize", raw=b"{}")
    assert status == 400
    assert (response["error"]["param"], response["error"]["message"]) == ("tokens", "'tokens' is missing")


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"prompt": NaN}',
    b'{"prompt": "hi", "temperature": NaN}',
    b'{"prompt": "hi", "temperature": Infinity}',
    b'{"prompt": "hi", "temperature": 1e400}',
    b'{"prompt": "hi", "logit_bias": {"5": -1e999}}',
    b'{"prompt": "hi", "n": ' + b"9" * 10_000 + b"}",
    b'{"prompt": [' + b"9" * 10_000 + b"]}",
    b'{"prompt": "a\0b"}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00 x"}',
    b'{"prompt": "\\ud800\\u0041"}',
    b'{"prompt": "hi", "cache_salt": "\\udfff"}',
    b'{"prompt": "hi", "prompt": "ho"}',
    b'{"prompt": "hi", "n": 1, "seed": ' + b"9" * 10_000 + b', "n": 1}',
    b'{"prompt": ' + b"[" * 20_000,
    b'{"metadata": ' + b"[" * 20_000,
    b'{"prompt": "hi", "metadata": ' + b"[" * 20_000 + b"]" * 20_000 + b', "prompt": "hi"}',
    b'{"prompt": "hi", "logit_bias": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_bad_bodies_are_refused(rig: Rig, body: bytes) -> None:
    status, response = rig.client.call("POST", "/v1/completions", raw=body)
    assert status == 400
    assert response["error"]["type"] == "invalid_request_error"


def test_duplicates_are_named(rig: Rig) -> None:
    raw = b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
    status, response = rig.client.call("POST", PATHS["chat"], raw=raw)
    assert (status, response["error"]["param"]) == (400, "messages[0].content")


def test_a_string_equal_to_a_field_name_is_not_a_duplicate(rig: Rig) -> None:
    assert rig.run("completions", prompt=["prompt", "prompt"], user="n").requests
    assert rig.run("chat", messages=[USER | {"content": '"role"'}, USER]).requests


def test_an_escaped_nul_is_text_like_any_other(rig: Rig) -> None:
    assert rig.run("completions", prompt="a\0b", stop="\0", bad_words=["\0"]).text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("a\0é", max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab5"), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({*CHAT.struct.__struct_fields__, *COMPLETIONS.struct.__struct_fields__, "tools", "x"})


# The warning of the rig's long repr would hide a failure.
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None, max_examples=200)
@given(st.sampled_from(ENDPOINTS), st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
def test_no_body_is_an_internal_error(rig: Rig, endpoint: str, fields: dict[str, Any]) -> None:
    status, data, _ = rig.client.exchange("POST", PATHS[endpoint], MINIMAL[endpoint] | fields)
    assert status in (200, 400, 404), (status, data)


def test_names_with_slashes_are_found(rig: Rig) -> None:
    quoted = urllib.parse.quote("org/tiny", safe="")
    assert rig.client.call("GET", f"/v1/models/{quoted}")[1]["id"] == "org/tiny"
