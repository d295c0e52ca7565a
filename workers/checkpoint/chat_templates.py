"""Finds the chat templates of a checkpoint: the default, and the one for conversations with tools.

They are files, or else in JSON: one text, or a list of names and texts.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.checkpoint.atomic_file import write_atomically
from workers.checkpoint.hf_config import read_json

__all__ = ["TemplateFiles", "template_files"]

_DEFAULT = "default"
_TOOL_USE = "tool_use"
_MORE = "additional_chat_templates"


@dataclass(frozen=True)
class TemplateFiles:
    """Paths of Jinja files."""

    default: str | None
    tool_use: str | None
    """For conversations with tools; None: the default."""


def template_files(directory: Path, tokenizer_config: Mapping[str, Any], cache_dir: Path) -> TemplateFiles:
    """The templates in `directory`; texts from JSON are written to `cache_dir`."""
    paths = {path.stem: str(path) for path in (directory / _MORE).glob("*.jinja")}
    if (own := directory / "chat_template.jinja").exists():
        paths[_DEFAULT] = str(own)
    if not paths:
        texts = _embedded(directory, tokenizer_config)
        paths = {name: _as_file(text, cache_dir) for name, text in texts.items()}
    if len(paths) == 1:
        return TemplateFiles(next(iter(paths.values())), None)
    return TemplateFiles(paths.get(_DEFAULT), paths.get(_TOOL_USE))


def _embedded(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The texts by their names."""
    found = tokenizer_config.get("chat_template")
    if found is None:
        found = read_json(directory / "chat_template.json", missing_is_empty=True).get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {} if found is None else {_DEFAULT: found}


def _as_file(text: str, cache_dir: Path) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_dir / "templates" / f"{digest}.jinja"
    if not path.exists():
        write_atomically(path, text)
    return str(path)
