"""Comments and documents speak of the project alone, in plain English; every module says what it is."""

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.source import ROOT, all_files, package_files, parse

MAX_TUPLE_ASSIGNMENTS = 5.0
"""Most assignments such as `a, b = x(), y()` in 1,000 lines of a top-level package."""
# Prose says after, next to, alongside or besides instead.
PLACES = re.compile(r"\b(behind|beside)\b", re.IGNORECASE)
LEFT_BEHIND = re.compile(r"\b(left|leaves? \w+) behind\b", re.IGNORECASE)
POINTER = re.compile(r"\s*See [`\w. ]+\.?\s*")

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
    return sorted(path.relative_to(ROOT) for path in found if path.parent.name != "__pycache__")


@pytest.mark.parametrize("path", [*all_files(), *documents()], ids=str)
def test_no_word_about_machines_and_workplaces(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    assert [line for line in lines if FORBIDDEN.search(line)] == []


@pytest.mark.parametrize("path", package_files(), ids=str)
def test_every_module_says_what_it_is(path: Path) -> None:
    module = parse(path)
    assert not module.body or ast.get_docstring(module)


@cache
def docstrings(path: Path) -> list[tuple[int, str]]:
    """Line and text of every docstring, those of attributes included."""
    found = []
    for node in ast.walk(parse(path)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                found.append((node.lineno, text))
    return found


def comments(path: Path) -> Iterator[tuple[int, str]]:
    with (ROOT / path).open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def prose() -> Iterator[tuple[Path, int, str]]:
    """Path, line and text of docstrings, comments and Markdown lines; other strings are messages or data."""
    for path in all_files():
        if PLACES.search((ROOT / path).read_text(encoding="utf-8")):
            for line, text in [*docstrings(path), *comments(path)]:
                yield path, line, text
    for path in documents():
        if path.suffix == ".md":
            for line, text in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
                yield path, line, text


def test_prose_says_after_and_next_to() -> None:
    found = [f"{path}:{line}" for path, line, text in prose() if PLACES.search(LEFT_BEHIND.sub("", text))]
    assert not found, "\n".join(found)


def test_docstrings_have_a_noun() -> None:
    """A text that begins with "Of" leaves out what it is about: say "Number of ..." or "Names of ..."."""
    found = [f"{path}:{line}" for path in all_files() for line, text in docstrings(path) if text[:3] == "Of "]
    assert not found, "\n".join(found)


def test_no_docstring_only_points_elsewhere() -> None:
    """A method that another class documents needs no docstring of its own."""
    found = [
        f"{path}:{line}" for path in all_files() for line, text in docstrings(path) if POINTER.fullmatch(text)
    ]
    assert not found, "\n".join(found)


def is_tuple_assignment(node: ast.AST) -> bool:
    """Whether `node` is of the form `a, b = x(), y()`, and not a swap."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            swapped = all(isinstance(value, ast.Name) for value in values)
            return not (swapped and set(map(ast.unparse, names)) & set(map(ast.unparse, values)))
    return False


def test_unrelated_values_have_lines_of_their_own() -> None:
    assignments: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in package_files():
        lines[path.parts[0]] += (ROOT / path).read_text(encoding="utf-8").count("\n")
        assignments[path.parts[0]] += sum(map(is_tuple_assignment, ast.walk(parse(path))))
    rates = {package: round(1000 * assignments[package] / lines[package], 1) for package in lines}
    assert max(rates.values()) <= MAX_TUPLE_ASSIGNMENTS, rates
