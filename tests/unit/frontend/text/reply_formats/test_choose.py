"""The reply format of a model, and the form of its history, by the chat template or the command line."""

import typing
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.server import ServerConfig
from frontend.api.chat.messages import template_call
from frontend.text.chat_template import ChatTemplate
from frontend.text.reply_formats.base import ReplyOptions
from frontend.text.reply_formats.choose import REASONING, TOOL_CALLS, TextFormat, choose_format
from frontend.text.reply_formats.harmony import HarmonyFormat
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer

TOKENIZER = tiny_tokenizer.tokenizer()


def looped(call: str) -> str:
    """A template that writes all calls so."""
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% for c in m.tool_calls %}"
        + call
        + "{% endfor %}{% endfor %}"
    )


# How each family's template writes a call, and the form of the arguments that it takes.
FAMILIES: dict[str, tuple[str, str, str]] = {
    "hermes": ("hermes", "<tool_call>{{ c.function.arguments | tojson }}", "object"),
    "hermes, either": (
        "hermes",
        "<tool_call>{% if c.arguments is string %}{{ c.arguments }}"
        "{% else %}{{ c.arguments | tojson }}{% endif %}",
        "object",
    ),
    "coder": (
        "qwen3_coder",
        "<tool_call><function={{ c.name }}>{% for k, v in c.arguments | items %}{% endfor %}",
        "fields",
    ),
    "glm": (
        "glm45",
        "<tool_call>{% set args = c.arguments %}{% for k, v in args.items() %}<arg_key>{{ k }}{% endfor %}",
        "fields",
    ),
    "minimax": (
        "minimax_m2",
        "{%- set begin = '<minimax:tool_call>' -%}{{ begin ~ '\\n' }}{% for k, v in c.arguments.items() %}"
        "{% endfor %}",
        "fields",
    ),
    "deepseek v3": (
        "deepseek_v3",
        "{{ '<｜tool▁calls▁begin｜>' + c['function']['name'] + '```json' + c['function']['arguments'] }}",
        "text",
    ),
    "deepseek v3.1": ("deepseek_v31", "{{ '<｜tool▁calls▁begin｜>' + c['function']['arguments'] }}", "text"),
    "kimi": ("kimi_k2", "<|tool_calls_section_begin|>{{ c['function']['arguments'] | tojson }}", "object"),
    "mistral": (
        "mistral",
        "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.arguments | tojson }}",
        "object",
    ),
    "granite": ("granite", "<|tool_call|>[{{ c.function | tojson }}]", "object"),
    "olmo3": (
        "olmo3",
        "{{- '<function_calls>' -}}{% set args = c.arguments %}{% for k, v in args.items() %}{% endfor %}",
        "fields",
    ),
    "phi 4 mini": ("phi4_mini_json", "functools[{{ c.function | tojson }}]", "object"),
    "phi 4 mini, tags": (
        "phi4_mini_json",
        "{{- '<|tool_call|>' + (c.function | tojson) + '<|/tool_call|>' -}}",
        "object",
    ),
    "pythonic": (
        "pythonic",
        "Respond in the format [func_name1(a=b), func_name2(a)]"
        "{{ c.name + '(' }}{% for k in c.arguments %}{{ k + '=' }}{{ c.arguments[k] }}{% endfor %})",
        "fields",
    ),
    "llama": ("llama3_json", "{{ '\"parameters\": ' }}{{ c.arguments | tojson }}", "object"),
}


def template_of(text: str) -> ChatTemplate:
    return ChatTemplate(text, {})


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_found_by_their_templates(name: str) -> None:
    parser, call, form = FAMILIES[name]
    template = template_of(looped(call))
    found = choose_format("any", TOKENIZER, template)
    assert isinstance(found, TextFormat) and found._calls is not None
    assert issubclass(found._calls, TOOL_CALLS[parser])
    assert not found.separates_reasoning and not found.is_needed(ReplyOptions())
    source = template.source
    assert form == (
        "text" if source.joins_arguments else "fields" if source.needs_argument_fields else "object"
    )


@pytest.mark.parametrize(
    ("name", "arguments", "given"),
    [
        ("hermes", '{"a": 1}', {"a": 1}),
        ("hermes", "", {}),
        ("hermes", None, {}),
        ("hermes", "{bad", "{bad"),
        ("glm", '{"a": 1}', {"a": 1}),
        ("glm", "{bad", {"arguments": "{bad"}),
        ("coder", "[1]", {"arguments": [1]}),
        ("deepseek v3", '{"a":  1}', '{"a":  1}'),
        ("deepseek v3", {"a": "é"}, '{"a": "é"}'),
        ("deepseek v3", " ", "{}"),
        ("deepseek v3", None, "{}"),
        ("deepseek v3", "{bad", "{bad"),
    ],
)
def test_arguments_of_the_history_have_the_form_that_the_template_takes(
    name: str, arguments: Any, given: Any
) -> None:
    template = template_of(looped(FAMILIES[name][1]))
    call = template_call({"function": {"name": "f", "arguments": arguments}}, template.source, "x")
    assert call["function"]["arguments"] == given


def test_tools_are_described_where_the_template_does_not_read_them() -> None:
    for text in ("<tool_call>{{ messages }}", "{% if tools %}Use your tools.{% endif %}"):
        found = choose_format("any", TOKENIZER, template_of(text))
        assert isinstance(found, TextFormat) and found.describes_tools and found.parses_calls
        assert not found.is_needed(ReplyOptions()) and found.is_needed(ReplyOptions(tools={}))
    assert choose_format("any", TOKENIZER, template_of("{{ tools }}")) is None  # of an unknown format
    assert choose_format("any", TOKENIZER, None) is None
    assert choose_format("gpt_oss", None, None) is None


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages }}{{ tools }}</think>",
        "{{ tools }}{% if '</think>' in messages[0].content %}{% endif %}",
        "{{ tools }}{{ messages }}{% if add_generation_prompt %}<think>\n{% endif %}",
    ],
)
def test_reasoning_is_found_where_the_template_names_a_tag(text: str) -> None:
    found = choose_format("any", TOKENIZER, template_of(text))
    assert found is not None and found.separates_reasoning and not found.parses_calls
    assert found.ends_thinking([], "user: hi\n<think>\n")
    assert not found.ends_thinking([], "user: <think> hi")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{{ messages }}[THINK]{{ messages[0].content }}[/THINK]", "mistral"),
        ("{{ messages }}Write your response after 'Here is my response:'", "granite"),
        ("{{ messages }}Use <think></think> and <response></response>", "granite_tags"),
        ("{{ messages }}{{ '<think>' }}", "qwen3"),
    ],
)
def test_other_marks_of_reasoning_are_found(text: str, name: str) -> None:
    found = choose_format("any", TOKENIZER, template_of(text))
    assert isinstance(found, TextFormat) and found._think == REASONING[name]


@pytest.mark.parametrize("newer", [False, True])
def test_the_vocabulary_says_how_mistral_writes_calls(tmp_path: Path, newer: bool) -> None:
    tags = ["[TOOL_CALLS]", *(["[CALL_ID]", "[ARGS]"] if newer else [])]
    tokenizer = Tokenizer.from_checkpoint(tiny_tokenizer.checkpoint(tmp_path, tags=tags))
    found = choose_format("any", tokenizer, template_of(looped("[TOOL_CALLS]")))
    assert found is not None and found.call_text is not None
    assert found.call_text.section == (("", "") if newer else ("[TOOL_CALLS] [", "]"))
    assert found.call_text.tokens.keys() == ({"[TOOL_CALLS]", "[ARGS]"} if newer else {"[TOOL_CALLS]"})


def test_the_ids_of_mistrals_calls_are_those_that_its_templates_take() -> None:
    parser = TextFormat(TOOL_CALLS["mistral"], None, None).parser(ReplyOptions(tools={"f": {}}))
    calls = parser.feed(0, "[TOOL_CALLS]f[CALL_ID]aB3456789[ARGS]{}[TOOL_CALLS]f[ARGS]{}").calls
    assert calls[0].id == "aB3456789"
    assert len(calls[1].id) == 9 and calls[1].id.isalnum()


def test_the_command_line_overrides_the_template() -> None:
    template = template_of(looped("<tool_call></think>"))
    assert choose_format("any", TOKENIZER, template, "none", "none") is None
    found = choose_format("any", TOKENIZER, template, "glm45")
    assert isinstance(found, TextFormat) and found._calls is TOOL_CALLS["glm45"] and found.separates_reasoning
    described = choose_format("any", TOKENIZER, template, "generic")
    assert described is not None and described.describes_tools
    assert isinstance(choose_format("any", TOKENIZER, None, "openai", "openai_gptoss"), HarmonyFormat)
    assert isinstance(choose_format("gpt_oss", TOKENIZER, None, reasoning="qwen3"), TextFormat)
    with pytest.raises(ValueError, match="do not go together"):
        choose_format("any", TOKENIZER, None, "hermes", "openai_gptoss")


def test_the_flags_name_all_parsers() -> None:
    hints = typing.get_type_hints(ServerConfig)
    for flag, names, more in (
        ("tool_call_parser", TOOL_CALLS, {"none", "openai"}),
        ("reasoning_parser", REASONING, {"none", "openai_gptoss"}),
    ):
        literal, _ = typing.get_args(hints[flag])
        assert set(typing.get_args(literal)) == {*names, *more}
