"""One life: error reports of its processes come first, then exit statuses; nothing is left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.shared.messages.supervisor import Dead, Heartbeat, Progress, Ready, ToSupervisor
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.liveness import PeerMonitor
from atom.supervisor import life as life_module
from atom.supervisor.failure import Failure
from atom.supervisor.life import Life
from tests.helpers.servers.domains import SLEEP, add_child, send, zmq_context


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    with zmq_context() as context:
        made = Life(context, tmp_path / "life", 60.0)
        yield made
        made.close()


def failure_of(life: Life) -> Failure:
    for _ in range(600):
        life.receive(0.1)
        if failure := life.failure():
            return failure
    raise AssertionError("it did not fail")


def wait_for_ends(life: Life) -> None:
    for child in life.children.values():
        child.process.wait(60)


def test_an_exit_without_a_report_names_process_and_status(life: Life) -> None:
    add_child(life, "core", SLEEP)
    assert life.failure() is None
    worker = add_child(life, "engine 2 worker 1", "raise SystemExit(3)")
    text = "engine 2 worker 1: ended with exit status 3"
    assert failure_of(life) == Failure("ended with exit status 3", text, child=worker)


def test_a_signal_is_reported_by_name(life: Life) -> None:
    add_child(life, "core", "import os; os.kill(os.getpid(), 9)")
    assert failure_of(life).text == "core: killed by SIGKILL"


def test_a_workers_report_comes_before_the_cores(life: Life) -> None:
    send(life, Dead("core", "a worker failed"), Dead("worker 0", "no such tensor"))
    add_child(life, "core", "raise SystemExit(1)")
    assert failure_of(life).text == "worker 0: no such tensor"


def test_a_report_sets_the_exit_status(life: Life) -> None:
    send(life, Dead("core", "no room", ExitStatus.RESOURCES))
    core = add_child(life, "core", "raise SystemExit(1)")
    assert failure_of(life) == Failure("no room", "core: no room", ExitStatus.RESOURCES, core)


def test_a_killed_process_comes_before_reports_of_others(life: Life) -> None:
    send(life, Dead("worker 1", "the other rank is gone"), Dead("core", "worker 1 failed"))
    add_child(life, "worker 0", "import os; os.kill(os.getpid(), 9)")
    add_child(life, "worker 1", "raise SystemExit(1)")
    wait_for_ends(life)
    assert failure_of(life).text == "worker 0: killed by SIGKILL"


def test_a_report_comes_before_an_aborted_process(life: Life) -> None:
    send(life, Dead("worker 1", "no such tensor"))
    add_child(life, "worker 0", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    wait_for_ends(life)
    assert failure_of(life).text == "worker 1: no such tensor"


def test_ready_brings_its_details(life: Life) -> None:
    assert not life.is_ready and life.ready_s == 0
    send(life, Ready("core", {"kv_tokens": 7}, [3, 4]))
    assert life.receive()
    assert life.reports == {"core": Ready("core", {"kv_tokens": 7}, [3, 4])}
    assert life.is_ready and life.ready_s > 0


def test_progress_is_handed_on(tmp_path: Path) -> None:
    seen: list[Progress] = []
    with zmq_context() as context:
        life = Life(context, tmp_path / "life", 60.0, seen.append)
        send(life, Progress("worker 0", "Loading", 1, 2))
        life.receive(5)
        life.close()
    assert seen == [Progress("worker 0", "Loading", 1, 2)]


def test_close_kills_children_and_removes_the_directory(life: Life) -> None:
    assert life.directory.stat().st_mode & 0o777 == 0o700
    child = add_child(life, "worker 0", SLEEP)
    life.close()
    assert child.process.returncode == -9
    assert not life.directory.exists()


def test_the_end_of_a_child_that_is_being_stopped_is_no_failure(life: Life) -> None:
    child = add_child(life, "frontend", SLEEP)
    life.terminate()
    child.process.wait(60)
    assert life.failure() is None and not life.is_alive


def test_terminate_leaves_workers_to_their_core(life: Life) -> None:
    core, worker = add_child(life, "core", SLEEP), add_child(life, "worker 0", SLEEP)
    life.terminate()
    core.process.wait(60)
    assert not core.is_alive and worker.is_alive


@pytest.mark.parametrize("last", [Heartbeat("engine 1 core"), Ready("engine 1 core")])
def test_a_silent_process_hangs(life: Life, last: ToSupervisor, caplog: pytest.LogCaptureFixture) -> None:
    add_child(life, "engine 1 core", SLEEP)
    clock = [0.0]
    life._monitor = PeerMonitor(60, lambda: clock[0])
    send(life, last)
    life.receive()
    for _ in range(5):
        assert life.failure() is None
        clock[0] += 2.0
    assert failure_of_clock(life, clock) == "engine 1 core has not responded for 60 s"
    assert [record.message for record in caplog.records] == ["engine 1 core has not responded for 10 s"]


def failure_of_clock(life: Life, clock: list[float]) -> str:
    for _ in range(100):
        clock[0] += 2.0
        life.receive()
        if failure := life.failure():
            return failure.text
    raise AssertionError("it did not fail")


def test_a_process_that_never_gets_ready_has_failed(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    add_child(life, "core", SLEEP)
    add_child(life, "worker 0", SLEEP)
    monkeypatch.setattr(life_module, "START_DEADLINE_S", 0.0)
    failure = life.failure()
    assert failure is not None and failure.text == "not ready after 0 s: core, worker 0"
