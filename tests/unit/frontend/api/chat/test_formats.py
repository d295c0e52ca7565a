"""Models whose templates read no tools, and models with a template of their own for tools."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from frontend.api.chat.conversation import Conversation
from frontend.api.chat.formats import ChatFormat, ChatFormats
from frontend.api.chat.prompts import ChatPrompts
from frontend.api.chat.schema import Message
from frontend.api.schemas.tools import Function
from frontend.text.chat_encoder import ChatEncoder
from frontend.text.chat_template import ChatTemplate
from frontend.text.input_processor import InputProcessor
from frontend.text.reply_formats.choose import choose_format
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import Client, running_frontend
from tests.helpers.servers.tool_model import ARGUMENTS, CALLS, TEMPLATE, USER, WEATHER

CHAT = "/v1/chat/completions"
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Served:
    """A model that writes calls, its frontend, and the prompts."""

    def __init__(self, core: FakeCore, client: Client, tokenizer: Tokenizer):
        self.core = core
        self.client = client
        self._tokenizer = tokenizer

    def chat(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        status, response = self.client.post(CHAT, messages=[USER, *messages], **fields)
        assert status == 200, response
        message: dict[str, Any] = response["choices"][0]["message"]
        return message

    def prompt(self) -> str:
        ids = unpack_ids(self.core.requests[-1].prompt_ids).tolist()
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def serving(directory: Path, tool_template: str | None = None, **flags: Any) -> Iterator[Served]:
    checkpoint = tiny_tokenizer.checkpoint(directory, max_model_len=50_000)
    if tool_template is not None:
        path = directory / "tools.jinja"
        path.write_text(tool_template)
        checkpoint = replace(checkpoint, tool_template_file=str(path))
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert tokenizer is not None

    def script(request: AddRequest) -> Script:
        return Script(
            [*tokenizer.encode(CALLS, add_special_tokens=False), 1], FinishReason.EOS, 1, per_step=9
        )

    core = FakeCore(directory, script, max_model_len=50_000)
    with core, running_frontend(core, checkpoint, ServerConfig(**flags)) as client:
        yield Served(core, client, tokenizer)


@pytest.fixture(scope="module")
def generic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serving(tmp_path_factory.mktemp("generic"))


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serving(tmp_path_factory.mktemp("named"), TEMPLATE)


def arguments(message: dict[str, Any]) -> list[str]:
    return [call["function"]["arguments"] for call in message["tool_calls"]]


def test_a_round_trip_in_the_generic_format(generic: Served) -> None:
    first = generic.chat(tools=[WEATHER])
    assert arguments(first) == ARGUMENTS and first["content"] is None
    assert generic.prompt().startswith("[system]You may call functions.")
    assert json.dumps(WEATHER["function"], ensure_ascii=False) in generic.prompt()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": f"{number} °C"}
        for number, call in enumerate(first["tool_calls"])
    ]
    generic.chat(first, *reversed(results), tools=[WEATHER])
    history = (
        f"[assistant]{CALLS}[user]<tool_response>\n0 °C\n</tool_response>\n"
        "<tool_response>\n1 °C\n</tool_response>[assistant]"
    )
    assert generic.prompt().endswith(history)
    without_tools = generic.chat(first, *results)
    assert without_tools["content"] == CALLS and "tool_calls" not in without_tools
    assert generic.prompt().endswith(history) and "You may call" not in generic.prompt()


def test_tools_that_may_not_be_called_are_not_described(generic: Served) -> None:
    message = generic.chat(tools=[WEATHER], tool_choice="none")
    assert message["content"] == CALLS and "You may call" not in generic.prompt()


@pytest.mark.parametrize(("choice", "enforced"), [("required", True), (NAMED, True), ("auto", False)])
def test_generic_calls_are_enforced(tmp_path: Path, choice: Any, enforced: bool) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path)
    inputs = InputProcessor(checkpoint, Tokenizer.from_checkpoint(checkpoint), 2048, "fcfs")
    template = ChatTemplate.from_checkpoint(checkpoint)
    assert template is not None
    format = ChatFormat(ChatEncoder(template, inputs), choose_format("any", inputs.tokenizer, template))
    prompts = ChatPrompts(ChatFormats(format, format), lenient=False)
    function = Function(name="get_weather", parameters={"type": "object"})
    turns = [("", Message(role="user", content="hi"))]
    prompt = prompts.prompt(Conversation(turns=turns, functions=[function], tool_choice=choice), [])
    assert (prompt.constraint is not None) is enforced
    if prompt.constraint is not None:
        assert "<tool_call>" in prompt.constraint.source.text


def test_who_tells_of_tools_is_said(
    generic: Served, named: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for served, form in ((generic, "generic"), (named, "template")):
        status, models = served.client.call("GET", "/v1/models")
        assert (status, models["data"][0]["tools"]) == (200, form)
    with caplog.at_level(logging.INFO):
        for _ in serving(tmp_path):
            pass
    assert any("a system message describes those" in record.message for record in caplog.records)


def test_conversations_with_tools_have_a_template_of_their_own(named: Served) -> None:
    first = named.chat(tools=[WEATHER])
    assert arguments(first) == ARGUMENTS and "<tools>" in named.prompt()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "20 °C"} for call in first["tool_calls"]
    ]
    named.chat(first, *results)
    assert named.prompt().count("<tool_response>20 °C") == 2 and "<tools>" not in named.prompt()
    named.chat()
    assert named.prompt() == f"[user]{USER['content']}[assistant]"


def test_the_generic_format_replaces_the_templates(tmp_path: Path) -> None:
    for served in serving(tmp_path, TEMPLATE, tool_call_parser="generic"):
        first = served.chat(tools=[WEATHER])
        assert "You may call functions." in served.prompt() and "<tools>\n{" in served.prompt()
        assert "<|im_start|>system\n<tools>" not in served.prompt()
        assert arguments(first) == ARGUMENTS
