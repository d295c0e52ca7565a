"""Tools, calls and results as texts of messages."""

import json
from typing import Any

import msgspec
import pytest

from frontend.api.chat.generic_tools import with_tools, without_calls
from frontend.api.chat.messages import Turn, decode_messages
from frontend.errors import RequestError
from frontend.text.chat_template import ChatTemplate

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "天气 {}"}}


def turns(*messages: dict[str, Any]) -> list[Turn]:
    return decode_messages([msgspec.Raw(json.dumps(message).encode()) for message in messages], False, [])


def contents(made: list[Turn]) -> list[tuple[str, Any]]:
    return [(message.role, message.content) for _, message in made]


def call(call_id: Any, name: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


USER = {"role": "user", "content": "hi"}


def described(source: str, *messages: dict[str, Any]) -> list[tuple[str, Any]]:
    return contents(with_tools(turns(*messages), [TOOL], ChatTemplate(source, {})))


def test_tools_are_described_in_a_system_message() -> None:
    (role, guide), user = described(PLAIN, USER)
    assert (role, user) == ("system", ("user", "hi"))
    assert '{"name": "get_weather", "description": "天气 {}"}' in guide and "<tool_call>" in guide
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert described(PLAIN, system, USER) == [("system", f"Be brief.\n\n{guide}"), user]
    assert described(NO_SYSTEM, USER) == [("user", f"{guide}\n\nhi")]
    assert contents(with_tools(turns(USER), [], ChatTemplate(PLAIN, {}))) == [user]


def test_calls_and_results_are_texts() -> None:
    history = [
        USER,
        {
            "role": "assistant",
            "content": "Looking.",
            "tool_calls": [call("1", "f", '{"a": 1}'), call("2", "g")],
        },
        result("2", "second"),
        result("1", "first"),
        {"role": "user", "content": "go on"},
        {"role": "user", "content": "now"},
        {"role": "assistant", "tool_calls": [call("3", "f", "bad")]},
        result("3", "third"),
    ]
    assert contents(without_calls(turns(*history))) == [
        ("user", "hi"),
        (
            "assistant",
            'Looking.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        ),
        (
            "user",
            "<tool_response>\nfirst\n</tool_response>\n<tool_response>\nsecond\n</tool_response>\ngo on",
        ),
        ("user", "now"),
        ("assistant", '<tool_call>\n{"name": "f", "arguments": "bad"}\n</tool_call>'),
        ("user", "<tool_response>\nthird\n</tool_response>"),
    ]


def test_ids_may_have_any_form() -> None:
    made = without_calls(turns({"role": "assistant", "tool_calls": [call(["x"], "f"), call(None, "f")]}))
    assert made[0][1].tool_calls is None


def test_malformed_calls_are_refused_by_name() -> None:
    with pytest.raises(RequestError) as caught:
        without_calls(turns(USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}))
    assert caught.value.param == "messages[1].tool_calls[0].function"
