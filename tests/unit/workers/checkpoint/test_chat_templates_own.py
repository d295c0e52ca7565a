"""The template of DeepSeek-V3.2, which is published without one: the prompts of its published encoder."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from frontend.errors import RequestError
from frontend.text.chat_template import ChatTemplate
from frontend.text.detokenizer import Detokenizer
from frontend.text.reply_formats.base import CallDelta, ReplyOptions, merge_calls
from frontend.text.reply_formats.choose import TextFormat, choose_format
from frontend.text.reply_formats.deepseek_v32 import DeepSeekV32
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.text.replies import SHAPES, WRITERS
from tests.helpers.text.replies import TOOLS as TOOL_SCHEMAS
from workers.checkpoint.chat_templates import template_files

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("clock", "weather")
]
TOOLS_JSON = "\n".join(
    f'{{"name": "{name}", "parameters": {{"type": "object", "properties": {{}}}}}}'
    for name in ("clock", "weather")
)
INTRODUCTION = "de56a40488ab7b8e"
"""SHA-256 of the published text from two newlines before `## Tools` to `<functions>` and a newline."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    directory = tmp_path_factory.mktemp("v32")
    found = template_files(directory, {}, "deepseek_v32", directory / "cache")
    assert found.default is not None and found.tool_use is None
    return ChatTemplate.from_file(Path(found.default), {})


def says(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_an_own_template_of_the_checkpoint_has_precedence(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own")
    found = template_files(tmp_path, {}, "deepseek_v32", tmp_path / "cache").default
    assert found == str(tmp_path / "chat_template.jinja")
    assert template_files(tmp_path / "none", {}, "llama", tmp_path / "cache").default is None


@pytest.mark.parametrize(("thinking", "mark"), [(False, "</think>"), (True, "<think>")])
def test_the_reply_begins_with_or_after_its_reasoning(
    template: ChatTemplate, thinking: bool, mark: str
) -> None:
    messages = [
        says("system", "Be brief."),
        says("user", "Hi"),
        says("assistant", "Hello", reasoning_content="Politely."),
        says("user", "Bye"),
    ]
    begin = f"{BEGIN}Be brief.{USER}Hi{ASSISTANT}</think>Hello{END}{USER}Bye"
    assert template.render(messages, {"thinking": thinking}) == f"{begin}{ASSISTANT}{mark}"
    assert template.render(messages, {"thinking": thinking}, add_generation_prompt=False) == begin
    assert template.render(messages[:1], {}).endswith(f"Be brief.{ASSISTANT}</think>")


def test_calls_and_results(template: ChatTemplate) -> None:
    messages = [
        says("user", "When and how?"),
        says(
            "assistant",
            "I look.",
            reasoning_content="Two calls.",
            tool_calls=[call("clock"), call("weather", city="Köln", days=[1, {"a": None}], exact=True)],
        ),
        says("tool", "noon"),
        says("tool", "rain"),
    ]
    calls = (
        "I look.\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, {"a": null}]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜function_calls>{END}"
    )
    results = "\n\n<function_results>\n<result>noon</result>\n<result>rain</result>\n</function_results>"
    prompt = template.render(messages, {"thinking": True}, tools=TOOLS)
    introduction, functions, rest = prompt.partition(TOOLS_JSON)
    assert hashlib.sha256(introduction.removeprefix(BEGIN).encode()).hexdigest()[:16] == INTRODUCTION
    wanted = f"\n</functions>\n{USER}When and how?{ASSISTANT}<think>Two calls.</think>{calls}{results}"
    assert functions and rest == f"{wanted}\n\n<think>"
    plain = template.render(messages, {})
    assert plain == f"{BEGIN}{USER}When and how?{ASSISTANT}</think>{calls}{results}\n\n</think>"
    assert template.render([says("system", "S"), *messages], {}, tools=TOOLS).startswith(
        f"{BEGIN}S\n\n## Tools"
    )
    with pytest.raises(RequestError, match="must follow the call"):
        template.render([*messages, says("tool", "more")], {})


@pytest.mark.parametrize("special", [True, False])
def test_its_calls_are_read_whether_the_marker_is_a_special_token_or_not(
    template: ChatTemplate, tmp_path: Path, special: bool
) -> None:
    marker = ["｜DSML｜"]
    checkpoint = tiny_tokenizer.checkpoint(tmp_path, marker if special else (), () if special else marker)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert tokenizer is not None
    found = choose_format("deepseek_v32", tokenizer, template)
    assert found is not None and (found.call_text is None) is special
    parser = found.parser(ReplyOptions(tools=TOOL_SCHEMAS))
    detokenizer = Detokenizer(tokenizer)
    calls: list[CallDelta] = []
    for token in tokenizer.encode(WRITERS["deepseek_v32"][1](SHAPES["two"]), add_special_tokens=False):
        merge_calls(calls, parser.feed(token, detokenizer.feed(token)).calls)
    assert [(each.name, json.loads(each.arguments)) for each in calls] == SHAPES["two"].calls


def test_its_replies_are_parsed(template: ChatTemplate) -> None:
    found = choose_format("deepseek_v32", tiny_tokenizer.tokenizer(), template)
    assert isinstance(found, TextFormat) and found._calls is DeepSeekV32 and found.separates_reasoning
    assert template.reads_tools and template.source.needs_argument_fields
