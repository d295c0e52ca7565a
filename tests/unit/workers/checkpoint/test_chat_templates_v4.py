"""The template of DeepSeek-V4, which is published without one: the prompts of its published encoder."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from frontend.api.chat.conversation import Conversation
from frontend.api.chat.messages import decode_messages, template_messages
from frontend.api.chat.template_options import template_options
from frontend.errors import RequestError
from frontend.images.image_parts import ImageParts, ImageRules
from frontend.text.chat_template import ChatTemplate
from frontend.text.detokenizer import Detokenizer
from frontend.text.reply_formats.base import ReplyDelta, ReplyOptions, merge_calls
from frontend.text.reply_formats.choose import TextFormat, choose_format
from frontend.text.reply_formats.deepseek_v32 import DeepSeekV4
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.text.replies import SHAPES, WRITERS
from tests.helpers.text.replies import TOOLS as TOOL_SCHEMAS
from workers.checkpoint.chat_templates import V4_ENCODER, template_files

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather for a specific location",
    "parameters": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "The city name"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Temperature unit"},
        },
        "required": ["location"],
    },
}
SEARCH = {
    "name": "search",
    "description": "Search the web for information",
    "parameters": {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "Search query"},
            "num_results": {"type": "integer", "description": "Number of results to return"},
        },
        "required": ["query"],
    },
}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, SEARCH)]
INTRODUCTION = "c7c9042638154a23"
"""SHA-256 of the published text from `## Tools` to the two newlines before the schemas."""
REMINDER = (
    "\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)
DEEP, DEEPEST = "f7a24f3b3050d4a8", "53fb31b8392ec5b4"
"""SHA-256 of the published texts of reasoning effort, which end with two newlines."""


def says(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def load(directory: Path) -> ChatTemplate:
    found = template_files(directory, {}, "deepseek_v4", directory / "cache")
    assert found.default is not None and found.tool_use is None
    return ChatTemplate.from_file(Path(found.default), {})


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return load(tmp_path_factory.mktemp("v4"))


def test_the_published_case_with_tools(template: ChatTemplate) -> None:
    """The encoder's first case; with tools, all reasoning is kept."""
    messages = [
        says("system", "You are a helpful assistant."),
        says("user", "What's the weather in Beijing?"),
        says(
            "assistant",
            None,
            reasoning_content="The user wants to know the weather in Beijing. "
            "I should use the get_weather tool.",
            tool_calls=[call(1, "get_weather", location="Beijing", unit="celsius")],
        ),
        says("tool", '{"temperature": 22, "condition": "sunny", "humidity": 45}', tool_call_id="call_1"),
        says(
            "assistant",
            "The weather in Beijing is currently sunny with a temperature of 22°C and 45% humidity.",
            reasoning_content="Got the weather data. Let me format a nice response.",
        ),
    ]
    prompt = template.render(messages, {"thinking": True}, add_generation_prompt=False, tools=TOOLS)
    schemas = f"{json.dumps(WEATHER)}\n{json.dumps(SEARCH)}\n"
    begin, found, rest = prompt.partition(schemas)
    system, newlines, introduction = begin.partition("\n\n")
    assert found and newlines and system == f"{BEGIN}You are a helpful assistant."
    assert sha(introduction) == INTRODUCTION
    assert rest == (
        f"{REMINDER}{USER}What's the weather in Beijing?{ASSISTANT}<think>The user wants to know the weather "
        "in Beijing. I should use the get_weather tool.</think>\n\n"
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="location" string="true">Beijing</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="unit" string="true">celsius</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜tool_calls>{END}"
        f'{USER}<tool_result>{{"temperature": 22, "condition": "sunny", "humidity": 45}}</tool_result>'
        f"{ASSISTANT}<think>Got the weather data. Let me format a nice response.</think>The weather in "
        f"Beijing is currently sunny with a temperature of 22°C and 45% humidity.{END}"
    )


def test_the_published_case_without_tools(template: ChatTemplate) -> None:
    """The encoder's second case, in which earlier reasoning is dropped; and what its options change."""
    messages = [
        says("system", "You are a helpful assistant."),
        says("user", "Hello"),
        says("assistant", "Hi there!", reasoning_content="The user said hello."),
        says("user", "What is the capital of France?"),
        says("assistant", "The capital of France is Paris.", reasoning_content="It is Paris."),
    ]
    first = f"{BEGIN}You are a helpful assistant.{USER}Hello{ASSISTANT}"
    second = f"Hi there!{END}{USER}What is the capital of France?{ASSISTANT}"
    paris = f"The capital of France is Paris.{END}"

    def prompt(**options: Any) -> str:
        return template.render(messages, options, add_generation_prompt=False)

    assert prompt(thinking=True) == f"{first}</think>{second}<think>It is Paris.</think>{paris}"
    assert prompt(thinking=False) == f"{first}</think>{second}</think>{paris}"
    assert prompt(drop_thinking=False) == (
        f"{first}<think>The user said hello.</think>{second}<think>It is Paris.</think>{paris}"
    )
    assert template.render(messages[:4], {}) == f"{first}</think>{second}<think>"
    assert template.render(messages[:4], {"thinking": False}) == f"{first}</think>{second}</think>"
    assert template.options == {"thinking", "drop_thinking", "reasoning_effort"}


def test_results_have_the_order_of_their_calls_and_are_one_turn_with_the_next_question(
    template: ChatTemplate,
) -> None:
    messages = [
        says("user", "When and how?"),
        says(
            "assistant",
            "I look.",
            reasoning_content="Two calls.",
            tool_calls=[call(1, "clock"), call(2, "weather", city="Köln", days=[1, {"a": None}], exact=True)],
        ),
        says("tool", "rain", tool_call_id="call_2"),
        says("tool", "noon", tool_call_id="call_1"),
        says("user", "And then?"),
    ]
    calls = (
        "I look.\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, {"a": null}]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜tool_calls>{END}"
    )
    results = "<tool_result>noon</tool_result>\n\n<tool_result>rain</tool_result>"
    turn = f"{USER}{results}\n\nAnd then?{ASSISTANT}"
    begin = f"{USER}When and how?{ASSISTANT}"
    with_tools = template.render(messages, {"thinking": True}, tools=TOOLS)
    assert with_tools.startswith(f"{BEGIN}\n\n## Tools\n\n")
    assert with_tools.endswith(f"{REMINDER}{begin}<think>Two calls.</think>{calls}{turn}<think>")
    assert template.render(messages, {"thinking": True}) == f"{BEGIN}{begin}</think>{calls}{turn}<think>"
    assert template.render(messages, {"thinking": False}) == f"{BEGIN}{begin}</think>{calls}{turn}</think>"


@pytest.mark.parametrize(
    ("encoder", "wanted"),
    [
        (None, {"xhigh": DEEP, "max": DEEP}),
        ('REASONING_EFFORT_MAX = "…"', {"xhigh": DEEP, "max": DEEP}),
        (
            'REASONING_EFFORT_PROMPTS: Dict[str, str] = {"low": ""}',
            {"medium": DEEP, "high": DEEP, "xhigh": DEEP, "max": DEEPEST},
        ),
    ],
)
def test_levels_of_effort_are_those_of_the_release(
    tmp_path: Path, encoder: str | None, wanted: dict[str, str]
) -> None:
    if encoder is not None:
        (tmp_path / V4_ENCODER).parent.mkdir()
        (tmp_path / V4_ENCODER).write_text(f"{encoder}\nraise SystemExit")
    template = load(tmp_path)
    messages = [says("system", "Be brief."), says("user", "Hi")]
    rest = f"Be brief.{USER}Hi{ASSISTANT}"
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        prompt = template.render(messages, {"reasoning_effort": effort})
        text = prompt.removeprefix(BEGIN).removesuffix(f"{rest}<think>")
        assert (sha(text) if text else None) == wanted.get(effort)
        off = template.render(messages, {"reasoning_effort": effort, "thinking": False})
        assert off == f"{BEGIN}{rest}</think>"
    assert template.render(messages, {"reasoning_effort": "none"}) == f"{BEGIN}{rest}</think>"
    assert template.options == {"thinking", "drop_thinking", "reasoning_effort"}


def test_messages_of_the_api(template: ChatTemplate) -> None:
    """A developer's message is the system's, as in OpenAI's API: V4's own developer is a search agent's."""
    bodies: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning": "A call.", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]},
        {"role": "tool", "content": "noon", "tool_call_id": "a"},
    ]  # fmt: skip
    turns = decode_messages([json.dumps(body).encode() for body in bodies], False, [])  # type: ignore[misc]
    messages = template_messages(turns, template, False, [], ImageParts(ImageRules("no images")))
    conversation = Conversation(turns=turns, effort="none")
    options = template_options(conversation, template, None, False, [])
    assert options == {"reasoning_effort": "none", "thinking": False}
    calls = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    wanted = f"{USER}Hi{ASSISTANT}<think>A call.</think>\n\n{calls}{END}{USER}<tool_result>noon</tool_result>"
    prompt = template.render(messages, {}, tools=TOOLS)
    assert prompt.startswith(f"{BEGIN}Be brief.\n\n## Tools")
    assert prompt.endswith(f"{REMINDER}{wanted}{ASSISTANT}<think>")
    with pytest.raises(RequestError, match="latest_reminder"):
        template.render([says("latest_reminder", "Monday")], {})


def test_a_message_is_continued(template: ChatTemplate) -> None:
    messages = [says("user", "Hi"), says("system", "Be brief."), says("assistant", "Hel")]
    begin = f"{BEGIN}{USER}Hi"
    assert template.render_continued(messages, {}) == f"{begin}Be brief.{ASSISTANT}<think></think>Hel"
    again = template.render([messages[0], says("assistant", "Hello")], {"thinking": False})
    assert again == f"{begin}{ASSISTANT}</think>Hello{END}{ASSISTANT}</think>"


def test_its_replies_are_parsed_token_by_token(template: ChatTemplate) -> None:
    tokenizer = tiny_tokenizer.tokenizer()
    found = choose_format("deepseek_v4", tokenizer, template)
    assert isinstance(found, TextFormat) and found._calls is DeepSeekV4 and found.separates_reasoning
    assert template.reads_tools and template.source.needs_argument_fields
    reply = "Look.</think>" + WRITERS["deepseek_v4"][1](SHAPES["two"])
    parser = found.parser(ReplyOptions(tools=TOOL_SCHEMAS, thinking=True))
    detokenizer = Detokenizer(tokenizer)
    total = ReplyDelta()
    for token in tokenizer.encode(reply, add_special_tokens=False):
        delta = parser.feed(token, detokenizer.feed(token))
        total.reasoning += delta.reasoning
        total.text += delta.text
        merge_calls(total.calls, delta.calls)
    assert total.reasoning == "Look." and total.text == ""
    assert [(each.name, json.loads(each.arguments)) for each in total.calls] == SHAPES["two"].calls
