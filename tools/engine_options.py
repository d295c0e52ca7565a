"""Writes atom/engine/engine_options.py: the keyword arguments of LLMEngine for type checkers.

python -m tools.engine_options
"""

from dataclasses import fields
from pathlib import Path

from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import NAMES, OBJECT, Field, fields_of

MODULE = Path(__file__).resolve().parents[1] / "atom/engine/engine_options.py"
LINE = 110
_PATHS = {"download_dir", "step_trace", "torch_profiler_dir"}

_HEAD = '''\
"""The options of `LLMEngine` and `AsyncLLMEngine`, but for `model`. `make docs` writes this file.

docs/use/flags.md explains each one.
"""

import os
from typing import Any, Literal, TypedDict

__all__ = ["EngineOptions"]


class EngineOptions(TypedDict, total=False):
    """Fields of the configuration classes, with the types that they accept."""
'''


def main() -> None:
    MODULE.write_text(module_text(), encoding="utf-8")


def module_text() -> str:
    """The module, formatted as ruff does it."""
    lines = [_HEAD]
    for concern in fields(EngineConfig):
        config_class: type = concern.default_factory  # type: ignore[assignment]
        lines += [f"    # {config_class.__name__}", *map(_line, fields_of(config_class))]
    return "\n".join(line for line in lines if line) + "\n"


def _line(field: Field) -> str:
    """The line of a field; empty for `model`, which is no option."""
    if field.name == "model":
        return ""
    kinds = [*_kinds(field), *(["None"] if field.optional else [])]
    line = f"    {field.name}: {' | '.join(kinds)}"
    if len(line) <= LINE:
        return line
    (literal,) = [kind for kind in kinds if kind.startswith("Literal[")]
    inner = literal.removeprefix("Literal[").removesuffix("]")
    return line.replace(literal, f"Literal[\n        {inner}\n    ]")


def _kinds(field: Field) -> list[str]:
    if field.choices:
        quoted = ", ".join(f'"{choice}"' for choice in field.choices)
        return [f"Literal[{quoted}]"]
    if field.limits == OBJECT:
        return ["str", "dict[str, Any]"]
    if field.limits == NAMES:
        return ["str", "list[str]"]
    if field.name in _PATHS:
        return ["str", "os.PathLike[str]"]
    return [field.kind.__name__, *(["str"] if field.is_size else [])]


if __name__ == "__main__":
    main()
