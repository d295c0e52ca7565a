"""Prometheus accepts its configuration and the alerts, and the alerts fire when they should."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@pytest.mark.parametrize("command", ["check config prometheus.yml", "test rules alerts_test.yml"])
def test_promtool_accepts_it(command: str, deploy: Path) -> None:
    done = subprocess.run(
        ["promtool", *command.split()],
        cwd=deploy / "monitoring",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
