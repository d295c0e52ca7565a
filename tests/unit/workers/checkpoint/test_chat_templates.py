"""The default template and the one for tools, from files and from JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.checkpoint.chat_templates import template_files

NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]


def texts(directory: Path, config: dict[str, Any]) -> tuple[str | None, ...]:
    """(the default, the template for tools)"""
    found = template_files(directory, config, "llama", directory / "cache")
    return tuple(path and Path(path).read_text() for path in (found.default, found.tool_use))


@pytest.mark.parametrize(
    ("embedded", "default", "tool_use"),
    [
        (None, None, None),
        ("one", "one", None),
        (NAMED, "d", "t"),
        ([{"name": "tool_use", "template": "t"}], "t", None),
        ([{"name": "a", "template": "a"}, {"name": "b", "template": "b"}], None, None),
    ],
)
@pytest.mark.parametrize("file", ["tokenizer_config", "chat_template"])
def test_templates_in_json(
    tmp_path: Path, file: str, embedded: Any, default: str | None, tool_use: str | None
) -> None:
    config = {"chat_template": embedded}
    if file == "chat_template":
        (tmp_path / "chat_template.json").write_text(json.dumps(config))
        config = {}
    assert texts(tmp_path, config) == (default, tool_use)


def test_files_win(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own")
    assert texts(tmp_path, {"chat_template": NAMED}) == ("own", None)
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools")
    (more / "rag.jinja").write_text("documents")
    assert texts(tmp_path, {"chat_template": NAMED}) == ("own", "tools")


@pytest.mark.parametrize("embedded", [7, {"name": "a"}, ["a"], [{"name": "a"}]])
def test_templates_of_another_type_are_named(tmp_path: Path, embedded: Any) -> None:
    with pytest.raises(ValueError, match="chat_template"):
        texts(tmp_path, {"chat_template": embedded})
