"""The table of all documented fields: the effect of each, or its refusal by name.

Supported fields are sent to the real app, and must change the engine's request or the response;
without them, or with a neutral value, that change must be absent.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from atom.shared.config.server import ServerConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.engine import pack_ids, unpack_ids
from atom.shared.messages.grammar import CompiledGrammar, GrammarSource
from frontend.api.chat.schema import CHAT
from frontend.api.completions.schema import COMPLETIONS
from frontend.api.generation.prompts import Prompt
from frontend.api.generation.structured_output import reply_constraint
from frontend.api.schemas.fields import Schema
from frontend.api.schemas.generation import GenerationRequest
from frontend.api.schemas.structured_output import StructuredOutputs
from frontend.errors import RequestError
from frontend.text.constraint import Constraint
from frontend.text.grammar_process import Compilation, GrammarProcess
from frontend.text.input_processor import InputProcessor
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import MODEL, running_frontend
from tests.helpers.servers.rig import CALLS, MINIMAL, TOKENIZER, TOOL, Ran, Rig, body_of, running_rig

SCHEMAS: dict[str, Schema[Any]] = {"chat": CHAT, "completions": COMPLETIONS}
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
NULL = ("json_schema", '{"type":"null"}')
DRAFTS = SpeculativeConfig("ngram", 2)
FOX = TOKENIZER.encode("fox", add_special_tokens=False)
ENDLESS = 9000


class Row(NamedTuple):
    """A value of one field, further fields that it needs, and its effect."""

    value: Any
    shows: Callable[[Ran], bool]
    others: dict[str, Any] = {}
    neutral: tuple[Any, ...] = ()


BOTH: dict[str, Row] = {
    "temperature": Row(0, lambda ran: ran.sent.sampling.temperature == 0, neutral=(0.6,)),
    "top_p": Row(0.5, lambda ran: ran.sent.sampling.top_p == 0.5, neutral=(1,)),
    "top_k": Row(3, lambda ran: ran.sent.sampling.top_k == 3, neutral=(-1, 0)),
    "min_p": Row(0.1, lambda ran: ran.sent.sampling.min_p == 0.1, neutral=(0,)),
    "seed": Row(-2, lambda ran: ran.sent.sampling.seed == (1 << 64) - 2),
    "n": Row(
        2, lambda ran: [r.sampling.sequence for r in ran.requests] == [0, 1] == _indices(ran), neutral=(1,)
    ),
    "max_tokens": Row(4, lambda ran: ran.sent.max_tokens == 4 and ran.choice["finish_reason"] == "length"),
    "max_completion_tokens": Row(4, lambda ran: ran.sent.max_tokens == 4),
    "stop": Row(["wor"], lambda ran: ran.text == "Hello ", neutral=("", [])),
    "stop_token_ids": Row([9], lambda ran: ran.sent.stop_token_ids == [9], neutral=([],)),
    "ignore_eos": Row(True, lambda ran: ran.sent.eos_token_ids == [], neutral=(False,)),
    "priority": Row(-5, lambda ran: ran.sent.priority == -5, neutral=(0,)),
    "data_parallel_rank": Row(0, lambda ran: len(ran.requests) == 1),
    "timeout": Row(1.0, lambda ran: ran.choice["raw_finish_reason"] == "timeout", {"max_tokens": ENDLESS}),
    "stream": Row(True, lambda ran: len(ran.events) > 2, neutral=(False,)),
    "stream_options": Row(
        {"include_usage": True}, lambda ran: "usage" in ran.events[-1], {"stream": True}, ({},)
    ),
    "presence_penalty": Row(-2, lambda ran: ran.processors.presence_penalty == -2, neutral=(0,)),
    "frequency_penalty": Row(0.5, lambda ran: ran.processors.frequency_penalty == 0.5, neutral=(0,)),
    "repetition_penalty": Row(1.1, lambda ran: ran.processors.repetition_penalty == 1.1, neutral=(1,)),
    "logit_bias": Row(
        {"5": -100, "7": 2.5},
        lambda ran: (
            (unpack_ids(ran.processors.bias_ids).tolist(), ran.processors.bias_values)
            == ([5, 7], [-100, 2.5])
        ),
        neutral=({},),
    ),
    "min_tokens": Row(
        3, lambda ran: (ran.processors.min_tokens, ran.processors.end_ids) == (3, [1]), neutral=(0,)
    ),
    "bad_words": Row(["fox"], lambda ran: FOX in ran.processors.bad_words, neutral=([],)),
    "allowed_token_ids": Row(
        [9, 4, 9], lambda ran: unpack_ids(ran.processors.allowed_ids).tolist() == [4, 9]
    ),
    "include_stop_str_in_output": Row(
        True, lambda ran: ran.text == "Hello wor", {"stop": ["wor"]}, neutral=(False,)
    ),
    "skip_special_tokens": Row(False, lambda ran: "<s>" in ran.text, neutral=(True,)),
    "return_token_ids": Row(
        True,
        lambda ran: ran.choice.get("token_ids", [])[-1:] == [1] and _prompt_ids(ran) == _sent_ids(ran),
        neutral=(False,),
    ),
    "truncate_prompt_tokens": Row(1, lambda ran: _sent_ids(ran) == _whole_ids(ran)[-1:], neutral=(5000,)),
    "truncation_side": Row(
        "right",
        lambda ran: _sent_ids(ran) == _whole_ids(ran)[:1],
        {"truncate_prompt_tokens": 1},
        neutral=("left",),
    ),
    "cache_salt": Row("pepper", lambda ran: len(ran.sent.cache_salt) == 64),
    "prediction": Row(
        {"type": "content", "content": "fox"}, lambda ran: ran.sent.prediction_ids == pack_ids(FOX)
    ),
    "response_format": Row(
        {"type": "json_object"}, lambda ran: _grammar(ran) == ("json_object", ""), neutral=({"type": "text"},)
    ),
    "structured_outputs": Row(
        {"json": {"type": "null"}},
        lambda ran: _grammar(ran) == NULL,
        {},
        ({},),
    ),
    "guided_json": Row({"type": "null"}, lambda ran: _grammar(ran) == NULL),
    "guided_regex": Row("a+", lambda ran: _grammar(ran) == ("regex", "a+")),
    "guided_choice": Row(["a"], lambda ran: "const_string" in _grammar(ran)[1], neutral=([],)),
    "guided_grammar": Row("root ::= x", lambda ran: _grammar(ran) == ("grammar", "root ::= x")),
    "request_id": Row("my-id.7", lambda ran: ran.response["id"].endswith("-my-id.7")),
}

ONLY: dict[str, dict[str, Row]] = {
    "chat": {
        "messages": Row(TALK, lambda ran: "[assistant]So" in ran.prompt),
        "prompt": Row(TALK, lambda ran: "[assistant]So" in ran.prompt, {"messages": None}),
        "echo": Row(True, lambda ran: ran.text.startswith("SoHello"), {"messages": TALK}, (False,)),
        "logprobs": Row(
            True,
            lambda ran: ran.choice["logprobs"] is not None and _chat_token(ran) == "He",
            neutral=(False,),
        ),
        "top_logprobs": Row(
            2, lambda ran: len(_first_content(ran)["top_logprobs"]) == 2, {"logprobs": True}, (0,)
        ),
        "prompt_logprobs": Row(
            2, lambda ran: len(ran.response.get("prompt_logprobs", ())) == len(_sent_ids(ran)), {}, (False,)
        ),
        "return_tokens_as_token_ids": Row(
            True, lambda ran: _chat_token(ran).startswith("token_id:"), {"logprobs": True}, (False,)
        ),
        "add_special_tokens": Row(True, lambda ran: ran.prompt.startswith("<s>"), neutral=(False,)),
        "add_generation_prompt": Row(False, lambda ran: ran.prompt == "[user]hi", neutral=(True,)),
        "continue_final_message": Row(
            True, lambda ran: ran.prompt == "[user]hi[assistant]So", {"messages": TALK}, (False,)
        ),
        "chat_template_kwargs": Row({"tone": "!!"}, lambda ran: ran.prompt.endswith("!!"), neutral=({},)),
        "reasoning_effort": Row("low", lambda ran: ran.prompt.endswith("low")),
        "include_reasoning": Row(
            False,
            lambda ran: "reasoning" not in ran.choice["message"] and ran.text == "so",
            {"messages": [{"role": "user", "content": "ponder"}]},
            (True,),
        ),
        "tools": Row(
            [TOOL],
            lambda ran: ran.choice["finish_reason"] == "tool_calls" and '"look"' in ran.prompt,
            {},
            ([],),
        ),
        "tool_choice": Row("none", lambda ran: ran.text == CALLS, {"tools": [TOOL]}, ("auto",)),
        "parallel_tool_calls": Row(
            False, lambda ran: len(ran.choice["message"]["tool_calls"]) == 1, {"tools": [TOOL]}, (True,)
        ),
    },
    "completions": {
        "prompt": Row("hello", lambda ran: ran.prompt == "<s>hello"),
        "echo": Row(True, lambda ran: ran.text.startswith("hiHello"), neutral=(False,)),
        "logprobs": Row(1, lambda ran: ran.choice["logprobs"] is not None and _completion_token(ran) == "He"),
        "prompt_logprobs": Row(
            2, lambda ran: len(ran.choice.get("prompt_logprobs", ())) == len(_sent_ids(ran)), {}, (False,)
        ),
        "return_tokens_as_token_ids": Row(
            True, lambda ran: _completion_token(ran).startswith("token_id:"), {"logprobs": 0}, (False,)
        ),
        "add_special_tokens": Row(False, lambda ran: ran.prompt == "hi", neutral=(True,)),
        "best_of": Row(2, lambda ran: len(ran.requests) == 2, {"n": 2}),
    },
}
# Without these fields, requests are invalid or equal.
WITHOUT_CONTRAST = {"messages", "prompt", "best_of", "data_parallel_rank", "timeout"}

REFUSED: dict[str, Any] = {
    "custom_logit_processor": "code",
    "custom_params": {"a": 1},
    "detokenize": False,
    "early_stopping": True,
    "ebnf": "root ::= x",
    "guided_decoding_backend": "auto",
    "length_penalty": 2,
    "logits_processors": ["x"],
    "logprob_token_ids": [1],
    "lora_path": "x",
    "no_stop_trim": True,
    "regex": "a+",
    "return_hidden_states": True,
    "rid": "x",
    "session_params": {"id": "x"},
    "spaces_between_special_tokens": False,
    "thinking_token_budget": 5,
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
}
REFUSED_ONLY: dict[str, dict[str, Any]] = {
    "chat": {
        "audio": {"voice": "x"},
        "chat_template": "{{ messages }}",
        "documents": [{"text": "x"}],
        "function_call": {"name": "f"},
        "functions": [{"name": "f"}],
        "media_io_kwargs": {"image": {}},
        "mm_processor_kwargs": {"a": 1},
        "modalities": ["audio"],
        "moderation": {"x": 1},
        "reasoning": {"effort": "low"},
        "separate_reasoning": False,
        "stream_reasoning": False,
        "thinking": {"type": "enabled"},
        "verbosity": "low",
        "web_search_options": {"x": 1},
    },
    "completions": {"prompt_embeds": "x"},
}

HARMLESS = {
    *("client_metadata", "metadata", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "session_id", "store", "user"),
}


def _indices(ran: Ran) -> list[int]:
    return [choice["index"] for choice in ran.response["choices"]]


def _sent_ids(ran: Ran) -> list[int]:
    return unpack_ids(ran.sent.prompt_ids).tolist()


def _prompt_ids(ran: Ran) -> Any:
    return ran.response.get("prompt_token_ids") or ran.choice.get("prompt_token_ids")


def _whole_ids(ran: Ran) -> list[int]:
    if ran.response["object"] == "chat.completion":
        return TOKENIZER.encode("[user]hi[assistant]", add_special_tokens=False)
    return [0, *TOKENIZER.encode("hi", add_special_tokens=False)]


def _first_content(ran: Ran) -> dict[str, Any]:
    content: dict[str, Any] = ran.choice["logprobs"]["content"][0]
    return content


def _chat_token(ran: Ran) -> str:
    token: str = _first_content(ran)["token"]
    return token


def _completion_token(ran: Ran) -> str:
    token: str = ran.choice["logprobs"]["tokens"][0]
    return token


_SOURCES: dict[bytes, GrammarSource] = {}
"""What was compiled, by the keys of the grammars."""


def _grammar(ran: Ran) -> tuple[str, str]:
    """The kind and text of the source that was compiled."""
    if ran.sent.grammar is None:
        return "", ""
    source = _SOURCES[ran.sent.grammar.row.key]
    return source.kind, source.text


def _not_compiled(
    _: GrammarProcess, source: GrammarSource, compilation: Compilation
) -> tuple[CompiledGrammar, bool]:
    _SOURCES[Constraint(source, "").key] = source
    return CompiledGrammar(b"compiled", memory=1), True


def supported(endpoint: str) -> dict[str, Row]:
    return BOTH | ONLY[endpoint]


def rows() -> list[tuple[str, str]]:
    return [(endpoint, name) for endpoint in SCHEMAS for name in supported(endpoint)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    sampling = {"temperature": 0.6, "top_k": 20}
    directory = tmp_path_factory.mktemp("rig")
    with (
        pytest.MonkeyPatch.context() as patch,
        running_rig(directory, ENDLESS, default_sampling=sampling, add_bos_token=True) as rig,
    ):
        patch.setattr(GrammarProcess, "compile", _not_compiled)
        yield rig


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_the_table_is_complete(endpoint: str) -> None:
    schema = SCHEMAS[endpoint]
    # test_fim and test_kv_transfer have the servers that the other two need.
    elsewhere = {"model", "suffix", "kv_transfer_params"}
    assert {*supported(endpoint)} == set(schema.struct.__struct_fields__) - elsewhere
    assert {*REFUSED, *REFUSED_ONLY[endpoint]} == set(schema.neutral)
    assert schema.harmless == HARMLESS
    assert not schema.harmless & {*schema.neutral, *schema.struct.__struct_fields__}
    assert not set(schema.neutral) & set(schema.struct.__struct_fields__)


@pytest.mark.parametrize(("endpoint", "name"), rows())
def test_supported_fields_have_an_effect(rig: Rig, endpoint: str, name: str) -> None:
    row = supported(endpoint)[name]
    assert row.shows(rig.run(endpoint, **{**row.others, name: row.value}))
    if name not in WITHOUT_CONTRAST:
        for nothing in (None, *row.neutral):
            assert not row.shows(rig.run(endpoint, **{**row.others, name: nothing}))


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [(endpoint, name) for endpoint in SCHEMAS for name in {**REFUSED, **REFUSED_ONLY[endpoint]}],
)
def test_refused_fields_are_named(rig: Rig, endpoint: str, name: str) -> None:
    schema = SCHEMAS[endpoint]
    value = (REFUSED | REFUSED_ONLY[endpoint])[name]
    error = rig.refused(endpoint, **{name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert f"'{name}' is not supported" in error["message"]
    for neutral in (None, *schema.neutral[name]):
        assert schema.decode(body_of(endpoint, **{name: neutral}), lenient=False)[1] == []
    _, warnings = schema.decode(body_of(endpoint, **{name: value}), lenient=True)
    assert len(warnings) == 1
    assert name in warnings[0]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"functions": [{"name": "f"}]}, "'functions' is not supported with this value (use 'tools')"),
        ({"function_call": {"name": "f"}}, "(use 'tool_choice')"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "custom tools work in /v1/responses"),
    ],
)
def test_refusals_say_what_to_use(rig: Rig, fields: dict[str, Any], text: str) -> None:
    assert text in rig.refused("chat", **fields)["message"]


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [(endpoint, name) for endpoint in SCHEMAS for name in sorted(HARMLESS)],
)
def test_harmless_fields_are_accepted(endpoint: str, name: str) -> None:
    assert SCHEMAS[endpoint].decode(body_of(endpoint, **{name: {"any": "thing"}}), lenient=False)[1] == []


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_the_model_must_be_the_one_served(rig: Rig, endpoint: str) -> None:
    assert rig.run(endpoint, model=MODEL).response["model"] == MODEL
    error = rig.refused(endpoint, model="other")
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_all_fields_of_the_openai_sdk_are_known() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
    from openai.types.completion_create_params import CompletionCreateParamsBase

    for schema, params in ((CHAT, ChatParams), (COMPLETIONS, CompletionCreateParamsBase)):
        known = {*schema.struct.__struct_fields__, *schema.neutral, *schema.harmless}
        assert set(params.__annotations__) - known == set()


def test_minimal_requests_have_no_optional_parts(rig: Rig) -> None:
    for endpoint in SCHEMAS:
        sent = rig.run(endpoint).sent
        assert (sent.sampling.logits_processors, sent.sampling.logprobs, sent.prompt_logprobs) == (
            None,
            -1,
            -1,
        )
        assert sent.cache_salt == ""


def test_defaults(rig: Rig) -> None:
    chat, completion = rig.run("chat").sent, rig.run("completions").sent
    assert (chat.max_tokens, completion.max_tokens) == (8192, 256)
    assert chat.sampling.temperature == completion.sampling.temperature == 0.6
    assert (chat.sampling.top_k, chat.sampling.top_p) == (20, 1.0)


def test_max_completion_tokens_takes_precedence(rig: Rig) -> None:
    assert rig.run("chat", max_tokens=3, max_completion_tokens=4).sent.max_tokens == 4


def test_chat_fills_what_is_left_of_the_context(rig: Rig) -> None:
    ran = rig.run("chat", messages=[{"role": "user", "content": "hello " * 1500}])
    assert ran.sent.max_tokens == 10_000 - ran.response["usage"]["prompt_tokens"] < 8192


@pytest.mark.parametrize(("limit", "kept"), [(100, 9900), (None, 10_000 - 256)])
def test_a_prompt_is_truncated_to_leave_room_for_the_response(rig: Rig, limit: int | None, kept: int) -> None:
    ran = rig.run("completions", prompt=[7] * 12_000, truncate_prompt_tokens=-1, max_tokens=limit)
    assert len(_sent_ids(ran)) == kept


def test_salts_keep_tenants_and_salts_apart(rig: Rig) -> None:
    salts = [rig.run("chat", cache_salt=salt).sent.cache_salt for salt in ("a", "b", "a")]
    assert salts[0] == salts[2] != salts[1]


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_usage_in_every_chunk(rig: Rig, endpoint: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = rig.run(endpoint, stream=True, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] == (0 if endpoint == "chat" else 1)
    assert events[-1]["choices"] == []


@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_ids_in_streams(rig: Rig, endpoint: str) -> None:
    ran = rig.run(endpoint, stream=True, return_token_ids=True)
    first = ran.events[0] if endpoint == "chat" else ran.events[0]["choices"][0]
    assert first["prompt_token_ids"] == _sent_ids(ran)
    ids = [i for event in ran.events for i in event["choices"][0].get("token_ids", ())]
    assert ids == rig.run(endpoint, return_token_ids=True).choice["token_ids"]


def test_lenient_servers_list_dropped_fields_in_warnings(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("lenient")
    server = ServerConfig(lenient_fields=True, default_max_tokens=33)
    with (
        FakeCore(directory, lambda _: Script([70])) as core,
        running_frontend(core, tiny_tokenizer.checkpoint(directory), server) as client,
    ):
        messages = [{"role": "user", "content": "hi", "mood": 1}]
        body = {"messages": messages, "verbosity": "low", "zzz": 1, "chat_template_kwargs": {"tone": 1}}
        status, response = client.post("/v1/chat/completions", **body)
        assert status == 200
        left_out = ["verbosity", "zzz", "messages[0].mood", "chat_template_kwargs.tone"]
        assert [text.split("'")[1] for text in response["warnings"]] == left_out
        assert core.requests[0].max_tokens == 33
        events = client.events("/v1/chat/completions", **body)
        assert all(event["warnings"] == response["warnings"] for event in events)
        status, response = client.post("/v1/chat/completions", **MINIMAL["chat"], temperature="x")
        assert (status, response["error"]["param"]) == (400, "temperature")


def test_fields_of_lenient_schemas_raise_nothing_but_request_errors() -> None:
    with pytest.raises(RequestError):
        CHAT.decode(b'{"messages": [], "n": "many"}', lenient=True)


def test_the_parts_of_a_prediction_are_one_text(rig: Rig) -> None:
    parts = [{"type": "text", "text": text} for text in ("fo", "x")]
    sent = rig.run("chat", prediction={"type": "content", "content": parts}).sent
    assert sent.prediction_ids == pack_ids(FOX)
    assert rig.run("chat", prediction={"type": "content", "content": ""}).sent.prediction_ids == b""


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("fox", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "fox"}, "prediction.type"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": "fox", "mood": 1}, "prediction.mood"),
        ({"type": "content", "content": [{"type": "image_url", "text": ""}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text", "text": "", "mood": 1}]}, "prediction.content[0]"),
        ({"type": "content", "content": "fox " * 10_001}, "prediction"),
    ],
)
@pytest.mark.parametrize("endpoint", SCHEMAS)
def test_a_prediction_of_another_form_is_refused(
    rig: Rig, endpoint: str, prediction: Any, param: str
) -> None:
    assert rig.refused(endpoint, prediction=prediction)["param"] == param


def test_a_prediction_is_a_hint_where_nothing_is_drafted(tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    inputs = InputProcessor(checkpoint, TOKENIZER, 100, "fcfs")
    assert inputs.prediction_ids("fox " * 1000) == []
    assert InputProcessor(checkpoint, TOKENIZER, 100, "fcfs", DRAFTS).prediction_ids("fox") == FOX
    with pytest.raises(RequestError, match="no tokenizer to read 'prediction' with"):
        InputProcessor(checkpoint, None, 100, "fcfs", DRAFTS).prediction_ids("fox")


def test_usage_has_the_draft_tokens(tmp_path: Path) -> None:
    script = Script([70, 71, 72, 73, 74], per_step=3, drafts=4)
    with (
        FakeCore(tmp_path, lambda _: script) as core,
        running_frontend(core, tiny_tokenizer.checkpoint(tmp_path)) as client,
    ):
        _, response = client.post("/v1/completions", prompt="hi", n=2)
        drafts = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 10}
        expected = {"reasoning_tokens": 0, **drafts}
        assert response["usage"]["completion_tokens_details"] == expected
        assert response["usage"]["completion_tokens"] == 10
        events = client.events("/v1/completions", prompt="hi", n=2, stream_options={"include_usage": True})
        assert events[-1]["usage"]["completion_tokens_details"] == expected
        script.drafts = 0
        _, response = client.post("/v1/completions", prompt="hi")
        assert "completion_tokens_details" not in response["usage"]


def test_white_space_of_json_is_an_option_of_a_constraint_and_none_itself() -> None:
    compact = StructuredOutputs(json={"type": "object"}, disable_any_whitespace=True)
    constraint = reply_constraint(GenerationRequest(structured_outputs=compact), Prompt([1]))
    assert constraint is not None and not constraint.source.any_whitespace
    assert reply_constraint(GenerationRequest(structured_outputs=StructuredOutputs()), Prompt([1])) is None
    alone = StructuredOutputs(disable_any_whitespace=True)
    with pytest.raises(RequestError, match="exactly one of") as caught:
        reply_constraint(GenerationRequest(structured_outputs=alone), Prompt([1]))
    assert caught.value.param == "structured_outputs"
