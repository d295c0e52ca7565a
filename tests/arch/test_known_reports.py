"""What users report: every row of the page names tests that exist, or says that nothing holds it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.source import ROOT

PAGE = (ROOT / "docs/use/known-reports.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NOT_HELD = "**not held**"
LEAST_ROWS = 43


def cells(row: str) -> list[str]:
    """The texts of a row of a table, whose bars in texts are written as `\\|`."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


ROWS = [
    cells(line)
    for line in PAGE.splitlines()
    if line.startswith("|") and not re.match(r"\|(?: users report |---)", line)
]


@cache
def functions(path: Path) -> set[str]:
    module = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) >= LEAST_ROWS
    assert len({row[0] for row in ROWS}) == len(ROWS), "a report stands twice"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_names_tests_or_is_not_held(row: list[str]) -> None:
    _, here, held = row
    named = NAMED.findall(held)
    assert here and (named or NOT_HELD in here)
    assert len(named) == held.count("`") // 2, "each is `tests/PATH.py::test_NAME`"
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or name not in functions(ROOT / path)
    ]
    assert missing == []


def test_bars_in_texts_end_no_cell() -> None:
    assert cells(r"| `a\|b` | c |  |") == [r"`a\|b`", "c", ""]
