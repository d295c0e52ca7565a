"""An engine that dies leaves a record, which is run again offline."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atom.shared.utils import envs
from tests.helpers.servers.random_server import ARGS, Crowd, write_checkpoint
from tests.helpers.servers.server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_requests_of_a_dead_engine_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for each in Path(envs.ATOM_CACHE_DIR).glob("native*"):  # its kernels take minutes to compile
        (cache / each.name).symlink_to(each)
    monkeypatch.setenv("ATOM_CACHE_DIR", str(cache))
    model = write_checkpoint(tmp_path / "model")
    crowd = Crowd(3, max_tokens=800)

    async def kill() -> None:
        async with crowd.streaming(server):
            for pid, line in server.children().items():
                if "workers.main" in line:
                    os.kill(pid, signal.SIGKILL)

    with running_server("--model", str(model), *ARGS, "--flight-recorder", "ids") as server:
        asyncio.run(kill())
        server.until("--replay-file .* runs")
        log = server.text()
    assert crowd.ends == {"finished": 3}
    found = re.search(r"--replay-file (\S+\.json) runs", log)
    assert found is not None, log
    command = [sys.executable, "-m", "atom.entrypoints.openai_server", "--replay-file", found[1]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "killed by SIGKILL" in result.stdout and "3 of 3 sequences ended" in result.stdout
    assert "the engine did not end" in result.stdout and "made up" not in result.stdout
