"""Finds the chat templates of a checkpoint: the default, and the one for conversations with tools.

They are files, or else in JSON: one text, or a list of names and texts. A family that is published without
one has it in `templates/`, under its model_type.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.checkpoint.atomic_file import write_atomically
from workers.checkpoint.hf_config import read_json

__all__ = ["V4_ENCODER", "TemplateFiles", "template_files"]

_DEFAULT = "default"
_TOOL_USE = "tool_use"
_MORE = "additional_chat_templates"
_OWN = Path(__file__).with_name("templates")
_V4 = "deepseek_v4"
V4_ENCODER = "encoding/encoding_dsv4.py"
"""DeepSeek-V4's own program for its prompts, which is never run."""
_V4_EFFORTS = "REASONING_EFFORT_PROMPTS"
"""A name that the program has since DeepSeek-V4-Flash-0731, whose levels of effort have other texts."""


@dataclass(frozen=True)
class TemplateFiles:
    """Paths of Jinja files."""

    default: str | None
    tool_use: str | None
    """For conversations with tools; None: the default."""


def template_files(
    directory: Path, tokenizer_config: Mapping[str, Any], model_type: str, cache_dir: Path
) -> TemplateFiles:
    """The templates in `directory`, else the family's own; texts from JSON are written to `cache_dir`."""
    paths = {path.stem: str(path) for path in (directory / _MORE).glob("*.jinja")}
    if (own := directory / "chat_template.jinja").exists():
        paths[_DEFAULT] = str(own)
    if not paths:
        texts = _embedded(directory, tokenizer_config) or _own(model_type, directory)
        paths = {name: _as_file(text, cache_dir) for name, text in texts.items()}
    if len(paths) == 1:
        return TemplateFiles(next(iter(paths.values())), None)
    return TemplateFiles(paths.get(_DEFAULT), paths.get(_TOOL_USE))


def _embedded(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The texts by their names."""
    found = tokenizer_config.get("chat_template")
    if found is None:
        found = read_json(directory / "chat_template.json", missing_is_empty=True).get("chat_template")
    if found is None or isinstance(found, str):
        return {_DEFAULT: found} if found else {}
    if not isinstance(found, list):
        raise ValueError(f"{directory}: chat_template must be a text, or a list of names and texts")
    return _by_name(found, directory)


def _by_name(entries: list[Any], directory: Path) -> dict[str, str]:
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in entries}
    except (KeyError, TypeError):
        raise ValueError(
            f"{directory}: each chat_template of the list must have a name and a template"
        ) from None


def _own(model_type: str, directory: Path) -> dict[str, str]:
    """The text for a family whose checkpoints have none."""
    path = _OWN / f"{model_type}.jinja"
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    if model_type == _V4:
        encoder = directory / V4_ENCODER
        has_high = encoder.exists() and _V4_EFFORTS in encoder.read_text(encoding="utf-8")
        text = f"{{%- set has_high_effort = {str(has_high).lower()} -%}}\n{text}"
    return {_DEFAULT: text}


def _as_file(text: str, cache_dir: Path) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_dir / "templates" / f"{digest}.jinja"
    if not path.exists():
        write_atomically(path, text)
    return str(path)
