"""The wheel holds the six packages and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.helpers.source import PACKAGES, ROOT

DEADLINE_S = 100
SUFFIXES = (".py", ".cpp", ".h")
DATA = ("static", "templates", "tuned")
"""Folders all of whose files are shipped."""


def sources() -> set[str]:
    found = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    return {
        str(path.relative_to(ROOT))
        for path in found
        if path.suffix in SUFFIXES or path.name == "py.typed" or not set(DATA).isdisjoint(path.parts)
    }


def test_the_wheel_is_the_source(tmp_path: Path) -> None:
    # In a copy: setuptools leaves folders next to the sources, and takes old ones into the wheel.
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    code = "from setuptools import build_meta; build_meta.build_wheel('out')"
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, timeout=DEADLINE_S, check=True, stdout=subprocess.DEVNULL
    )
    (wheel,) = (tmp_path / "out").glob("atom_serve-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == sources()
    assert zipfile.ZipFile(wheel).read(f"{wheel.stem.rsplit('-', 3)[0]}.dist-info/entry_points.txt") == (
        b"[console_scripts]\natom = atom.__main__:main\natom-launch = atom.launch:main\n\n"
        b"[sglang.srt.plugins]\natom = atom.plugin.sglang.registration:register\n\n"
        b"[vllm.general_plugins]\natom = atom.plugin.vllm.registration:register_models\n\n"
        b"[vllm.platform_plugins]\natom = atom.plugin.vllm.registration:register_platform\n"
    )
