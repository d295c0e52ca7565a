"""Unit tests lie where the module they test lies, and are named after it."""

from pathlib import Path

import pytest

from tests.helpers.source import ROOT

UNIT = Path("tests/unit")
NO_MODULES = ("deploy",)
"""Folders without Python modules."""


def unit_files() -> list[Path]:
    found = [path.relative_to(ROOT) for path in (ROOT / UNIT).rglob("test_*.py")]
    return sorted(path for path in found if path.relative_to(UNIT).parts[0] not in NO_MODULES)


@pytest.mark.parametrize("path", unit_files(), ids=str)
def test_a_unit_test_is_named_after_its_module(path: Path) -> None:
    """`test_NAME.py` or `test_NAME_aspect.py`; NAME is a module or package of that folder, or the folder."""
    folder = path.relative_to(UNIT).parent
    tested = path.stem.removeprefix("test_")
    names = {folder.name, *(each.stem for each in (ROOT / folder).iterdir() if each.suffix in ("", ".py"))}
    assert any(tested == name or tested.startswith(f"{name}_") for name in names)
