"""Comments and documents speak of the project alone, in plain English; every module says what it is."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.source import ROOT, all_files, package_files, parse, text_of

# Prose says after, next to, alongside or besides instead.
PLACES = re.compile(r"\b(behind|beside)\b", re.IGNORECASE)
LEFT_BEHIND = re.compile(r"\b(left|leaves? \w+) behind\b", re.IGNORECASE)
POINTER = re.compile(r"See [`\w. ]+\.?\s*")
SAYS_WHAT_IT_IS = re.compile(r'(?:#.*\n|\s)*(?:r?"""\s*\S|\Z)')

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


def test_no_word_about_machines_and_workplaces() -> None:
    found = [
        f"{path}: {each[0]}"
        for path in (*all_files(), *documents())
        for each in FORBIDDEN.finditer(text_of(path))
    ]
    assert not found, "\n".join(found)


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path in package_files() if not SAYS_WHAT_IT_IS.match(text_of(path))]
    assert not silent, "\n".join(silent)


def docstrings(path: Path, beginning: str = "") -> list[tuple[int, str]]:
    """Line and text of every docstring, those of attributes included, that begins so."""
    found: list[tuple[int, str]] = []
    if f'"""{beginning}' not in text_of(path):
        return found  # most files need not be parsed
    for node in ast.walk(parse(path)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if text.startswith(beginning):
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
        if PLACES.search(text_of(path)):
            for line, text in [*docstrings(path), *comments(path)]:
                yield path, line, text
    for path in documents():
        if path.suffix == ".md":
            for line, text in enumerate(text_of(path).splitlines(), 1):
                yield path, line, text


def test_prose_says_after_and_next_to() -> None:
    found = [f"{path}:{line}" for path, line, text in prose() if PLACES.search(LEFT_BEHIND.sub("", text))]
    assert not found, "\n".join(found)


def test_docstrings_have_a_noun() -> None:
    """A text that begins with "Of" leaves out what it is about: say "Number of ..." or "Names of ..."."""
    found = [f"{path}:{line}" for path in all_files() for line, _ in docstrings(path, "Of ")]
    assert not found, "\n".join(found)


def test_no_docstring_only_points_elsewhere() -> None:
    """A method that another class documents needs no docstring of its own."""
    found = [
        f"{path}:{line}"
        for path in all_files()
        for line, text in docstrings(path, "See ")
        if POINTER.fullmatch(text)
    ]
    assert not found, "\n".join(found)
