"""The unit under a real systemd: a user manager in namespaces of its own, which needs root.

It runs the shipped unit with short times, and without what only a system manager can do: DynamicUser and
the sandbox.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.servers.random_server import ARGS
from tests.helpers.servers.server import child_processes
from tests.helpers.source import ROOT

SYSTEMD = Path("/lib/systemd/systemd")
HIERARCHY = Path("/sys/fs/cgroup/systemd")
DEADLINE_S = 120.0
WATCHDOG_S = 6
REMOVED = re.compile(
    r"^(DynamicUser|CacheDirectory|PrivateTmp|Protect\w+|NoNewPrivileges|Limit\w+)=.*\n", re.MULTILINE
)
SCRIPT = """
mount -t proc proc /proc && mount -t tmpfs none /run
mkdir -p /run/systemd/system /run/user && mkdir -m 700 /run/user/0
export XDG_RUNTIME_DIR=/run/user/0 SYSTEMD_LOG_TARGET=console SYSTEMD_LOG_LEVEL=notice
/lib/systemd/systemd --user --unit=basic.target & wait
"""

pytestmark = [
    pytest.mark.skipif(not SYSTEMD.exists(), reason="systemd is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(not (HIERARCHY / "cgroup.procs").exists(), reason="no cgroup hierarchy of systemd"),
    pytest.mark.skipif(shutil.which("nsenter") is None, reason="nsenter is not installed"),
]


class Manager:
    """A systemd of its own; `pid` is its process, seen from outside."""

    def __init__(self, home: Path):
        self._cgroup = HIERARCHY / f"atom-test-{os.getpid()}"
        self._cgroup.mkdir()
        inside = (
            f"echo $$ > {self._cgroup}/cgroup.procs && exec unshare --mount --pid --fork --kill-child bash -c"
        )
        self._outer = subprocess.Popen(
            ["bash", "-c", f'{inside} "$0"', SCRIPT], env={**os.environ, "HOME": str(home)}
        )
        self.pid = self._find()
        deadline = time.monotonic() + 20
        while (state := self.systemctl("is-system-running").strip()) != "running":
            assert time.monotonic() < deadline, f"systemd is not running: {state}"
            time.sleep(0.1)

    def _find(self) -> int:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            pids = [self._outer.pid]
            for parent in pids:
                for pid, command in child_processes(parent).items():
                    if command.startswith(str(SYSTEMD)):
                        return pid
                    pids.append(pid)
            time.sleep(0.1)
        raise AssertionError("systemd did not start")

    def systemctl(self, *words: str) -> str:
        """The output of `systemctl --user`."""
        command = ["nsenter", "-t", str(self.pid), "-m", "-p", "env", "XDG_RUNTIME_DIR=/run/user/0"]
        done = subprocess.run(
            [*command, "systemctl", "--user", "--no-pager", *words],
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.stdout + done.stderr

    def properties(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        lines = self.systemctl("show", unit, *(f"--property={name}" for name in names)).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def wait_for(self, unit: str, state: str) -> None:
        """Until the unit is in this state."""
        deadline = time.monotonic() + DEADLINE_S
        while (now := self.properties(unit, "ActiveState")["ActiveState"]) != state:
            assert time.monotonic() < deadline, (
                f"{unit} is {now}, not {state}: {self.systemctl('status', unit)}"
            )
            time.sleep(0.2)

    def main_process(self, unit: str) -> int:
        """The process id of a unit's main process, seen from outside."""
        inner = self.properties(unit, "MainPID")["MainPID"]
        for pid in child_processes(self.pid):
            numbers = re.search(r"^NSpid:\s.*\s(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            if numbers and numbers[1] == inner:
                return pid
        raise AssertionError(f"no process {inner}")

    def close(self) -> None:
        """End it with everything in its namespace."""
        self._outer.kill()
        self._outer.wait(10)
        for _ in range(50):
            with contextlib.suppress(OSError):
                for directory, _, _ in os.walk(self._cgroup, topdown=False):
                    os.rmdir(directory)
                return
            time.sleep(0.1)


@pytest.fixture
def manager(tmp_path: Path, deploy: Path, model: str) -> Iterator[Manager]:
    units = tmp_path / ".config/systemd/user"
    units.mkdir(parents=True)
    text = REMOVED.sub("", (deploy / "systemd/atom@.service").read_text())
    launch = f"{sys.executable} -m atom.launch {' '.join(ARGS)}"
    text = text.replace("ExecStart=/srv/atom/.venv/bin/atom-launch", f"ExecStart={launch}")
    text = text.replace("/etc/atom", str(tmp_path)).replace("WatchdogSec=90", f"WatchdogSec={WATCHDOG_S}")
    text = text.replace("/var/cache", str(tmp_path))
    (units / "atom@.service").write_text(text)
    path = os.environ.get("PYTHONPATH", str(ROOT))
    (tmp_path / "tiny.env").write_text(
        f"ATOM_MODEL={model}\nATOM_SERVER_PORT=18431\nATOM_HANG_TIMEOUT=3\nPYTHONPATH={path}\n"
    )
    manager = Manager(tmp_path)
    try:
        yield manager
    finally:
        manager.close()


def ready() -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen("http://127.0.0.1:18431/ready", timeout=5) as one,
    ):
        return bool(one.status == 200)
    return False


def test_ready_watchdog_and_stop(manager: Manager) -> None:
    unit = "atom@tiny"
    manager.systemctl("start", "--no-block", unit)
    time.sleep(0.5)
    assert manager.properties(unit, "ActiveState")["ActiveState"] == "activating"
    manager.wait_for(unit, "active")
    assert ready(), "active only when the server is ready"
    assert "serving random" in manager.properties(unit, "StatusText")["StatusText"]
    time.sleep(2 * WATCHDOG_S)
    assert manager.properties(unit, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}

    os.kill(manager.main_process(unit), signal.SIGSTOP)
    began = time.monotonic()
    while manager.properties(unit, "NRestarts")["NRestarts"] == "0":
        assert time.monotonic() - began < DEADLINE_S, "the watchdog did not end a stopped server"
        time.sleep(0.2)
    print(f"a stopped server was restarted {time.monotonic() - began:.1f} s later (WatchdogSec={WATCHDOG_S})")
    manager.wait_for(unit, "active")
    assert ready()

    manager.systemctl("stop", unit)
    assert manager.properties(unit, "ActiveState", "Result") == {
        "ActiveState": "inactive",
        "Result": "success",
    }
