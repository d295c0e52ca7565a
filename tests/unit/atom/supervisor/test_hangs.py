"""Before processes that hang are killed, their stacks are kept in one file."""

import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.supervisor import hangs
from atom.supervisor.hangs import save_stacks
from atom.supervisor.life import Life
from tests.helpers.servers.domains import SLEEP, add_child, zmq_context

DEADLINE_S = 60.0
HANGS = """
import threading, time
from atom.shared.utils.stack_dump import dump_stacks_on_signal

def a_loop_without_end():
    while True:
        pass

def a_helper():
    time.sleep(60)

dump_stacks_on_signal("ipc://{directory}/supervisor", "{name}")
threading.Thread(target=a_helper, daemon=True).start()
open("{directory}/{name}.begun", "w").close()
a_loop_without_end()
"""


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path / "cache"))
    with zmq_context() as context:
        made = Life(context, tmp_path / "engine-0.3", 60.0)
        yield made
        made.close()


def begin(life: Life, name: str) -> None:
    add_child(life, name, HANGS.format(directory=life.directory, name=name))
    deadline = time.monotonic() + DEADLINE_S
    while not (life.directory / f"{name}.begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def saved(tmp_path: Path) -> str:
    (path,) = (tmp_path / "cache" / "hangs").iterdir()
    assert path.stat().st_mode & 0o077 == 0
    return path.read_text()


def test_stacks_of_all_threads_of_all_processes_are_kept(
    life: Life, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "_WAIT_S", DEADLINE_S)
    begin(life, "worker 0")
    begin(life, "worker 1")
    with caplog.at_level(logging.ERROR):
        life.keep_stacks("engine, life 3: the workers have not finished a step for 600 s")
    text = saved(tmp_path)
    assert text.startswith("engine, life 3: the workers have not finished a step for 600 s\n")
    for name in ("worker 0", "worker 1"):
        assert f"=== {name}, R (running)\n" in text
    assert text.count("in a_loop_without_end") == text.count("in a_helper") == 2
    (path,) = re.findall(r"are in (\S+)", caplog.text)
    assert Path(path).read_text() == text


def test_a_stopped_process_has_no_stacks_and_delays_nothing(
    life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "_WAIT_S", 3600.0)
    (life.directory / "core.stacks").write_text("last step sent: 7")
    begin(life, "worker 0")
    os.kill(life.children["worker 0"].process.pid, signal.SIGSTOP)
    life.keep_stacks("title")
    text = saved(tmp_path)
    assert "=== core, no process of this host any more\nlast step sent: 7\n" in text
    assert "=== worker 0, T (stopped)\nit has written no stacks\n" in text


def test_the_wait_for_a_process_that_cannot_write_is_bounded(life: Life, tmp_path: Path) -> None:
    """It ignores the signal; the file says so."""
    add_child(life, "worker 0", f"import signal; signal.signal(12, signal.SIG_IGN); {SLEEP}")
    begin(life, "worker 1")
    life.keep_stacks("title")
    assert re.search("=== worker 0, .*\nit has written no stacks", saved(tmp_path))


def test_without_stacks_there_is_no_file_and_old_files_go(life: Life, tmp_path: Path) -> None:
    save_stacks(life.directory, "title", [])
    assert not (tmp_path / "cache").exists()
    (life.directory / "core.stacks").write_text("x")
    for _ in range(25):
        save_stacks(life.directory, "title", [])
    assert len(list((tmp_path / "cache" / "hangs").iterdir())) == 20
