"""Rendering as models expect it."""

from typing import Any

import pytest

from frontend.errors import RequestError
from frontend.text.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"})


def render(source: str, **options: Any) -> str:
    return template(source).render(HELLO, options)


def test_blocks_leave_no_blank_lines() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\nend"
    assert render(source) == "<s>\nhello\nend"


def test_the_assistant_is_asked() -> None:
    assert render("{{ add_generation_prompt }} {{ tools is none }}") == "True True"


def test_json_keeps_its_characters() -> None:
    assert render("{{ x | tojson }}", x={"name": "你好 <b>"}) == '{"name": "你好 <b>"}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"


def test_loop_controls_and_dates() -> None:
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_training_marks_render_their_body() -> None:
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hello"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ nothing.at.all }}", "nothing"),
    ],
)
def test_a_failing_template_is_the_requests_fault(source: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools", "bos_token"])
def test_options_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} cannot be set"):
        render("{{ messages }}{{ add_generation_prompt }}{{ tools }}{{ bos_token }}", **{name: 1})


def test_a_variable_for_which_a_macro_has_a_default_is_an_option() -> None:
    default = "{% if effort is not defined %}{% set effort = 'medium' %}{% endif %}"
    source = "{% macro head() %}" + default + "Effort: {{ effort }}{% endmacro %}{{ head() }}"
    assert template(source).options == {"effort"}
    assert render(source) == "Effort: medium"
    assert render(source, effort="high") == "Effort: high"


def test_options_are_the_variables_that_the_template_reads() -> None:
    source = (
        "{% if thinking is not defined %}{% set thinking = true %}{% endif %}{% set own = namespace(x=1) %}"
        "{% macro say(what) %}{{ what }}{{ tone }}{% endmacro %}{{ bos_token }}{{ messages }}{{ thinking }}"
    )
    assert template(source).options == {"thinking", "tone"}
    assert render("{{ thinking }}", thinking=False) == "False"
    with pytest.raises(RequestError, match="tokenize not read by the template"):
        render("x", tokenize=True)


def test_the_final_message_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    turns = "{% for m in messages %}<{{ m.role }}>CONTENT</>{% endfor %}"
    loop = turns + "{% if add_generation_prompt %}!{% endif %}"
    plain = template(loop.replace("CONTENT", "{{ m.content }}")).render_continued(messages, {})
    assert plain == "<user>hello</><assistant>Well, "
    trimmed = template(loop.replace("CONTENT", "{{ m.content | trim }}")).render_continued(messages, {})
    assert trimmed == "<user>hello</><assistant>Well,"
    with pytest.raises(RequestError, match="leaves out the last message") as caught:
        template("{{ messages[0].content }}").render_continued(messages, {})
    assert caught.value.param == "continue_final_message"


def test_without_a_generation_prompt() -> None:
    source = "{{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}"
    assert template(source).render(HELLO, {}, add_generation_prompt=False) == "hello"


def test_a_template_that_does_not_compile_names_the_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("a\n{% for %}", {})


def test_tools_under_the_name_that_smollm3_reads() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    reads = "{% for tool in xml_tools or [] %}{{ tool.name }}{% endfor %}{{ messages[0].content }}"
    assert template(reads).reads_tools
    assert template(reads).render(HELLO, {}, tools=tools) == "lookhello"
    assert template(reads).render(HELLO, {"xml_tools": [{"name": "own"}]}, tools=tools) == "ownhello"
    both = template("{{ xml_tools is defined }}{{ tools[0].function.name }}")
    assert both.render(HELLO, {}, tools=tools) == "Falselook"
