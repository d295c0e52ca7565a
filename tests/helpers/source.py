"""The project's own source files, for the tests that hold its rules."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("atom", "frontend", "engine_core", "workers", "parallel", "atom_ops")


def package_files() -> list[Path]:
    """Every Python file that is shipped, and the benchmarks, relative to the root."""
    return _python_files(*PACKAGES, "benchmarks")


def all_files() -> list[Path]:
    """Every Python file of the repository, relative to the root."""
    return _python_files(*PACKAGES, "benchmarks", "tools", "tests")


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def text_of(path: Path) -> str:
    """The text of a file, whose path is relative to the root."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def _python_files(*folders: str) -> list[Path]:
    found = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts)
