"""The forms of content and the tools that templates read."""

from pathlib import Path
from typing import Any

import pytest

from frontend.text.chat_template import ChatTemplate
from frontend.text.template_reading import ContentForm, text_of

STRING = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %};{% endfor %}"
)
FIRST = "{% for m in messages %}{{ m.role }}: {{ m.content[0].text }};{% endfor %}"
FIRST_OF_EITHER = STRING.replace(
    "{{ m.content }}", "{{ m.content if m.content is string else m.content[0].text }}"
)
EITHER = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endif %};{% endfor %}"
)
ALTERNATE = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
USER_ONLY = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
TWO = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "form", "shown"),
    [
        (STRING, ContentForm.STRING, "one\ntwo"),
        (PARTS, ContentForm.PARTS, "onetwo"),
        (FIRST, ContentForm.ONE_PART, "one\ntwo"),
        (FIRST_OF_EITHER, ContentForm.STRING, "one\ntwo"),
        (EITHER, ContentForm.EITHER, "onetwo"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_no_text_is_lost(source: str, form: ContentForm, shown: str, role: str) -> None:
    found = template(source)
    assert found.reading.form(role) is form
    user = {"role": "user", "content": "Hello"}

    def render(content: Any) -> str:
        return found.render([user, {"role": role, "content": content}], {})

    assert render("a text").endswith(f"{role}: a text;") and "user: Hello;" in render("a text")
    assert render(TWO).endswith(f"{role}: {shown};")


def test_roles_may_have_other_forms() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content }}"
    )
    found = template(source + "{% endif %}{% endfor %}")
    assert found.reading.form("user") is ContentForm.ONE_PART
    assert found.reading.form("assistant") is ContentForm.STRING


def test_a_template_may_refuse_probes() -> None:
    assert template(ALTERNATE + PARTS).reading.form("user") is ContentForm.PARTS
    assert template(ALTERNATE + PARTS).reading.form("system") is ContentForm.STRING
    refuses = template("{{ raise_exception('never') }}{{ tools }}")
    assert refuses.reading.form("user") is ContentForm.STRING and refuses.reads_tools
    needs_system = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    assert template(needs_system + PARTS).reading.form("user") is ContentForm.PARTS


def test_texts_that_a_template_leaves_out() -> None:
    found = template(USER_ONLY).reading
    assert [found.form(role) for role in ("user", "assistant", "system")] == [
        ContentForm.STRING,
        ContentForm.NONE,
        ContentForm.NONE,
    ]


def test_a_template_that_loses_the_users_text_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    for source in ("Hello", "{% for m in messages %}{{ m.text }}{% endfor %}"):
        path.write_text(source)
        with pytest.raises(ValueError, match=r"mine\.jinja leaves out the text of user messages"):
            ChatTemplate.from_file(path, {})
    path.write_text(PARTS)
    assert ChatTemplate.from_file(path, {}).source.reads("content")


def test_other_parts_are_left_alone() -> None:
    images = [{"type": "image"}, *TWO]
    assert ContentForm.STRING.of(images) is images
    assert (text_of(None), text_of("a"), text_of(TWO)) == ("", "a", "one\ntwo")


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{{ tools | tojson }}" + STRING, True),
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + STRING, True),
        ("{% if messages[0].role == 'system' %}{{ tools }}{% endif %}" + STRING, True),
        ("{% if tools is defined and my_switch %}{{ tools }}{% endif %}" + STRING, False),
        ("{% if tools %}Use your tools.{% endif %}" + STRING, False),
        (STRING, False),
    ],
)
def test_tools_are_found_in_the_prompt(source: str, reads: bool) -> None:
    assert template(source).reads_tools is reads


def test_the_last_message_is_continued_in_every_form() -> None:
    for source in (STRING, PARTS, FIRST, EITHER):
        for content in ("Well, ", [{"type": "text", "text": "Well, "}]):
            messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
            assert template(source).render_continued(messages, {}) == "user: hi;assistant: Well, "
