"""Writes the README's tables of flags and environment variables from the code.

python -m tools.readme_tables
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from atom.config.cli import flags_of
from atom.config.engine import EngineConfig
from atom.config.fields import Field, fields_of
from atom.config.not_yet import REFUSED
from atom.config.server import ServerConfig
from atom.utils.envs import VARIABLES, Variable, acts

README = Path(__file__).resolve().parents[1] / "README.md"


def main() -> None:
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(readme: str) -> str:
    """The README's text with new tables between its markers; ValueError for a missing marker."""
    for marker, table in (("flags", flag_tables()), ("environment", environment_table())):
        begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
        before, found_begin, rest = readme.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"the README has no {begin} … {end}")
        readme = f"{before}{begin}\n{table}\n{end}{after}"
    return readme


def flag_tables() -> str:
    """The flags by concern, then the flags that are refused."""
    rows = [_flag_row(field) for field in _all_fields()]
    refused = [f"| `--{name.replace('_', '-')}` | {entry.reason} |" for name, entry in REFUSED.items()]
    return "\n".join(
        [
            "Each has a variable, `ATOM_` and its name in capitals (`ATOM_MAX_NUM_SEQS=64`), and a key in "
            "the file of `--config`. The command line overrides the variable, and the variable the file.",
            "",
            "| flag | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
            "Known, and refused with this reason unless the value asks for nothing:",
            "",
            "| flag | reason |",
            "|---|---|",
            *refused,
        ]
    )


def environment_table() -> str:
    rows = [_variable_row(variable) for variable in VARIABLES.values()]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])


def _all_fields() -> Iterator[Field]:
    for concern in fields(EngineConfig):
        yield from fields_of(concern.default_factory)
    yield from fields_of(ServerConfig)


def _flag_row(field: Field) -> str:
    flags = ", ".join(f"`{flag}`" for flag in flags_of(field))
    choices = f" ({', '.join(field.choices)})" if field.choices else ""
    return f"| {flags} | {_shown(field.default)} | {_cell(field.help + choices)} |"


def _variable_row(variable: Variable) -> str:
    default = "" if callable(variable.default) else _shown(variable.default)
    not_yet = "" if acts(variable.area) else " *Known, without effect yet.*"
    return f"| `{variable.name}` | {default} | {_cell(variable.help)}{not_yet} |"


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


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
