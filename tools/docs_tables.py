"""Writes the generated tables of flags, variables, the API, scaling, reliability and floors in docs/.

python -m tools.docs_tables
"""

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from atom.shared.config.cli import flags_of
from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import Field, fields_of
from atom.shared.config.nodes import NodesConfig
from atom.shared.config.not_yet import REFUSED
from atom.shared.config.other_engines import LLAMA_CPP, SAME, VLLM, OtherFlag
from atom.shared.config.server import ServerConfig
from atom.shared.utils.envs import VARIABLES, Variable, acts
from tools.api_table import api_tables, cell, route_table
from tools.reliability_table import reliability_table
from tools.roofline_table import roofline_tables
from tools.scaling_tables import scaling_tables

BEGIN = "<!-- table:begin -->"
END = "<!-- table:end -->"


def main() -> None:
    for page, table in TABLES.items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), table()), encoding="utf-8")


def with_table(page: str, table: str) -> str:
    """The page's text with `table` between its markers. Raises ValueError if a marker is missing."""
    before, found_begin, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def flag_tables() -> str:
    """A table per configuration class, then the refused flags."""
    parts = []
    for title, config_class in _config_classes():
        parts += [f"### {title}", "", "| flag | default | meaning |", "|---|---|---|"]
        parts += [*map(_flag_row, fields_of(config_class)), ""]
    parts += ["## Flags that are not supported", ""]
    parts += ["Known, and refused with this reason, except for the value that changes nothing.", ""]
    parts += ["| flag | accepted | reason |", "|---|---|---|"]
    parts += [
        f"| `--{name.replace('_', '-')}` | {f'`{entry.neutral}`' if entry.neutral else ''} | {entry.reason} |"
        for name, entry in REFUSED.items()
    ]
    return "\n".join(parts)


def environment_table() -> str:
    """One row per variable."""
    rows = [_variable_row(variable) for variable in VARIABLES.values()]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])


def coming_from_tables() -> str:
    """What this server has for the flags of vLLM and llama.cpp."""
    same = ", ".join(f"`{flag}`" for flag in SAME)
    parts = ["### vLLM", "", f"The same here: {same}.", ""]
    for title, flags in (("", VLLM), ("### llama.cpp", LLAMA_CPP)):
        parts += [title, ""] if title else []
        parts += ["| flag | accepted | here |", "|---|---|---|", *map(_other_row, flags), ""]
    return "\n".join(parts[:-1])


def _other_row(flag: OtherFlag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    accepted = "" if flag.accepted is None else ", ".join(f"`{value}`" for value in flag.values) or "yes"
    return f"| {names} | {accepted} | {cell(flag.advice)} |"


def api_page() -> str:
    """The routes, and a table for each request body."""
    return f"{route_table()}\n\n## Fields\n\n{api_tables()}"


def _config_classes() -> Iterator[tuple[str, type]]:
    """The titles that `--help` shows, and the classes."""
    for concern in fields(EngineConfig):
        yield concern.name, concern.default_factory  # type: ignore[misc]
    yield "server", ServerConfig
    yield "nodes", NodesConfig


def _flag_row(field: Field) -> str:
    flags = ", ".join(f"`{flag}`" for flag in flags_of(field))
    choices = f" ({', '.join(field.choices)})" if field.choices else ""
    return f"| {flags} | {_shown(field.default)} | {cell(field.help + choices)} |"


def _variable_row(variable: Variable) -> str:
    default = "" if callable(variable.default) else _shown(variable.default)
    not_yet = "" if acts(variable.area) else " *No effect yet.*"
    return f"| `{variable.name}` | {default} | {cell(variable.help)}{not_yet} |"


def _shown(default: object) -> str:
    match default:
        case None | "":
            return ""
        case True:
            return "on"
        case False:
            return "off"
        case _:
            return f"`{default}`"


_DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLES: dict[Path, Callable[[], str]] = {
    _DOCS / "use/flags.md": flag_tables,
    _DOCS / "use/coming-from.md": coming_from_tables,
    _DOCS / "use/environment.md": environment_table,
    _DOCS / "use/api.md": api_page,
    _DOCS / "operate/reliability.md": reliability_table,
    _DOCS / "operate/scaling.md": scaling_tables,
    _DOCS / "measurements/roofline.md": roofline_tables,
}


if __name__ == "__main__":
    main()
