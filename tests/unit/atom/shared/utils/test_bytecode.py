"""Children keep bytecode in the cache where the installation has none and gets none."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from atom.shared.utils.bytecode import bytecode_variables

NEVER, PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


@pytest.fixture
def torch_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "torch" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(source)))
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path / "cache"))
    return source


def test_an_installation_without_bytecode_in_which_none_is_written(
    tmp_path: Path, torch_source: Path
) -> None:
    assert bytecode_variables({NEVER: "1"}) == {PREFIX: str(tmp_path / "cache" / "bytecode"), NEVER: ""}


def test_an_installation_that_has_or_gets_bytecode(torch_source: Path) -> None:
    assert not bytecode_variables({})
    kept = Path(importlib.util.cache_from_source(str(torch_source)))
    kept.parent.mkdir()
    kept.touch()
    assert not bytecode_variables({NEVER: "1"})


def test_a_place_that_the_user_chose(torch_source: Path) -> None:
    assert not bytecode_variables({NEVER: "1", PREFIX: "/elsewhere"})


def test_a_cache_that_others_can_write(tmp_path: Path, torch_source: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert not bytecode_variables({NEVER: "1"})


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not bytecode_variables({NEVER: "1"})
