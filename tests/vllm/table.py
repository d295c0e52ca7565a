"""The table of docs/use/plugins.md: families, and whose attention they run with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.vllm.cases import Case

BEGIN, END = "<!-- families: written by make test-vllm -->", "<!-- end of families -->"


def table(cases: Sequence[Case], problems: Mapping[str, list[str]], attentions: Sequence[str]) -> list[str]:
    """Lines of the table. A family without a run with vLLM's attention is not registered with it."""
    families = sorted({case.row.model_type for case in cases})
    lines = [
        f"| `model_type` | {' | '.join(f'{each} attention' for each in attentions)} |",
        "|---|" + "---|" * len(attentions),
    ]
    for family in families:
        cells = [_cell(cases, problems, family, attention) for attention in attentions]
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return lines


def _cell(cases: Sequence[Case], problems: Mapping[str, list[str]], family: str, attention: str) -> str:
    runs = [case for case in cases if case.row.model_type == family and case.attention == attention]
    if not runs:
        return "vLLM's own model"
    if any(case.name not in problems for case in runs):
        return "not run"
    return "differs" if any(problems[case.name] for case in runs) else "equal ids"


def write_table(
    page: Path, cases: Sequence[Case], problems: Mapping[str, list[str]], attentions: Sequence[str]
) -> None:
    """Replace the table between its marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [BEGIN, "", *table(cases, problems, attentions), "", END]
    page.write_text(before + "\n".join(lines) + after)
