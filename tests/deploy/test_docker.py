"""The Dockerfiles pass hadolint. They are not built here."""

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_has_nothing_to_say(deploy: Path) -> None:
    files = sorted((deploy / "docker").glob("*.Dockerfile"))
    assert len(files) == 3
    done = subprocess.run(
        ["hadolint", *map(str, files)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
