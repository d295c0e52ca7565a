"""The tables of docs/use/plugins.md: families in a host, and whose attention they run with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from atom.plugin.families import HOSTS
from tests.helpers.checkpoints.tiny_models import Tiny


class Run(Protocol):
    """A run of a family in a host."""

    row: Tiny
    attention: str
    """Whose."""

    @property
    def name(self) -> str: ...


def table(
    host: str, runs: Sequence[Run], problems: Mapping[str, list[str]], attentions: Sequence[str]
) -> list[str]:
    """Lines of the table."""
    families = sorted({run.row.model_type for run in runs})
    lines = [
        f"| `model_type` | {' | '.join(f'{each} attention' for each in attentions)} |",
        "|---|" + "---|" * len(attentions),
    ]
    for family in families:
        cells = [_cell(host, runs, problems, family, attention) for attention in attentions]
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return lines


def _cell(
    host: str, runs: Sequence[Run], problems: Mapping[str, list[str]], family: str, attention: str
) -> str:
    of_cell = [run for run in runs if run.row.model_type == family and run.attention == attention]
    if not of_cell and family in HOSTS[host].own_attention:
        return f"{host}'s own model"
    if not of_cell or any(run.name not in problems for run in of_cell):
        return "not run"
    return "differs" if any(problems[run.name] for run in of_cell) else "equal ids"


def write_table(
    page: Path,
    host: str,
    runs: Sequence[Run],
    problems: Mapping[str, list[str]],
    attentions: Sequence[str],
) -> None:
    """Replace the host's table between its marks."""
    begin, end = marks(host)
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    lines = [begin, "", *table(host, runs, problems, attentions), "", end]
    page.write_text(before + "\n".join(lines) + after)


def marks(host: str) -> tuple[str, str]:
    """The lines around a host's table."""
    return f"<!-- families: written by make test-{host.lower()} -->", f"<!-- end of {host}'s families -->"
