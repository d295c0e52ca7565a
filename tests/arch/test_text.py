"""Comments and documents speak of the project alone, and every module says what it is."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.source import ROOT, all_files, package_files, parse

# In pieces, so that this file does not hold what it looks for.
FORBIDDEN = re.compile(
    "|".join(
        [
            r"(?<![\w.])/" + r"(work|root|tmp|opt|mnt)/\w",
            r"\bTO" + r"DO\b|\bFIX" + r"ME\b|\bXX" + r"X\b",
            r"\b(design|style)\." + r"md\b",
            r"\bcopied " + r"from\b",
        ]
    )
)


def documents() -> list[Path]:
    found = [path for suffix in ("md", "toml", "txt", "yml", "yaml") for path in ROOT.glob(f"*.{suffix}")]
    found += [ROOT / "Makefile", ROOT / ".ci/run", *(ROOT / "tests/requirements").iterdir()]
    found += [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).glob("*.mk")]
    found += [path for folder in ("docs", "deploy") for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path.relative_to(ROOT) for path in found)


@pytest.mark.parametrize("path", [*all_files(), *documents()], ids=str)
def test_no_word_about_machines_and_workplaces(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    assert [line for line in lines if FORBIDDEN.search(line)] == []


@pytest.mark.parametrize("path", package_files(), ids=str)
def test_every_module_says_what_it_is(path: Path) -> None:
    module = parse(path)
    assert not module.body or ast.get_docstring(module)
