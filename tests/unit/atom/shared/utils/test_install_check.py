"""The guard against other distributions with packages named like ours."""

import sys
from pathlib import Path

import pytest

from atom.shared.utils.install_check import check_install


def install(site: Path, name: str, **files: str) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for file_name, text in files.items():
        (info / file_name.replace("_txt", ".txt")).write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_a_source_tree_passes(site: Path) -> None:
    install(site, "unrelated", RECORD="unrelated/__init__.py,,\nunrelated/workers/__init__.py,,\n")
    check_install()


def test_our_own_distribution_passes(site: Path) -> None:
    install(site, "atom_serve", top_level_txt="atom\nfrontend\nworkers\n")
    check_install()


def test_a_clash_is_refused_by_its_name(site: Path) -> None:
    install(site, "atom_serve", top_level_txt="atom\nfrontend\nworkers\n")
    install(site, "frontend", RECORD="frontend/server.py,,\n")
    with pytest.raises(SystemExit, match="frontend installs a package 'frontend'"):
        check_install()


def test_a_clash_is_found_by_top_level_names_too(site: Path) -> None:
    install(site, "runtime-sdk", top_level_txt="workers\n")
    with pytest.raises(SystemExit, match="runtime-sdk installs a package 'workers'"):
        check_install()
