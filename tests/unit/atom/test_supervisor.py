"""Children that end: their error reports come first, then the exit status; nothing is left behind."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from atom.config.model import ModelConfig
from atom.messages.codec import Decoder, encode
from atom.messages.supervisor import Dead, Heartbeat, Progress, Ready, ToSupervisor
from atom.messages.worker import FromWorker, WorkerFailed
from atom.supervisor import Child, StartError, Supervisor
from atom.utils.exit_status import ExitStatus
from atom.utils.liveness import PeerMonitor


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with Supervisor() as made:
        yield made


def add_child(supervisor: Supervisor, name: str, code: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    supervisor._children[name] = Child(name, process)


def send_messages(supervisor: Supervisor, *messages: ToSupervisor) -> None:
    context = zmq.Context()
    with context.socket(zmq.PUSH) as socket:
        socket.connect(supervisor.endpoint("supervisor"))
        for message in messages:
            socket.send(encode(message))
    context.term()


def wait_for_ends(supervisor: Supervisor) -> None:
    for child in supervisor._children.values():
        child.process.wait(10)


def check_until_raised(supervisor: Supervisor) -> str:
    with pytest.raises(StartError) as raised:
        for _ in range(100):
            supervisor.check()
    return str(raised.value)


def test_an_exit_without_a_report_names_process_and_status(supervisor: Supervisor) -> None:
    add_child(supervisor, "core", "import time; time.sleep(60)")
    add_child(supervisor, "worker 1", "raise SystemExit(3)")
    assert check_until_raised(supervisor) == "worker 1: ended with exit status 3"


def test_a_signal_is_reported_by_name(supervisor: Supervisor) -> None:
    add_child(supervisor, "core", "import os; os.kill(os.getpid(), 9)")
    assert check_until_raised(supervisor) == "core: killed by SIGKILL"


def test_a_workers_report_comes_before_the_cores(supervisor: Supervisor) -> None:
    send_messages(supervisor, Dead("core", "a worker failed"), Dead("worker 0", "no such tensor"))
    add_child(supervisor, "core", "raise SystemExit(1)")
    assert check_until_raised(supervisor) == "worker 0: no such tensor"


def test_ready_brings_its_details(supervisor: Supervisor) -> None:
    add_child(supervisor, "core", "import time; time.sleep(60)")
    send_messages(supervisor, Ready("core", {"kv_tokens": 7}))
    supervisor.wait_ready({"core"})
    assert supervisor.details == {"kv_tokens": 7}


def test_progress_is_handed_on() -> None:
    seen: list[Progress] = []
    with Supervisor(seen.append) as supervisor:
        send_messages(supervisor, Progress("worker 0", "Loading", 1, 2))
        supervisor.check(wait_s=5)
    assert seen == [Progress("worker 0", "Loading", 1, 2)]


def test_close_ends_children_and_removes_the_directory() -> None:
    supervisor = Supervisor()
    assert supervisor.run_dir.stat().st_mode & 0o777 == 0o700
    add_child(supervisor, "worker 0", "import time; time.sleep(60)")
    (child,) = supervisor._children.values()
    supervisor.close()
    assert child.process.returncode == -9
    assert not supervisor.run_dir.exists()
    supervisor.close()


def test_a_missing_model_is_one_line(supervisor: Supervisor) -> None:
    with pytest.raises(StartError, match="^--model /no/such/place: no such path") as raised:
        supervisor.prepare(ModelConfig(model="/no/such/place"))
    assert "\n" not in str(raised.value)
    assert raised.value.status == ExitStatus.MODEL


def test_a_report_sets_the_exit_status(supervisor: Supervisor) -> None:
    send_messages(supervisor, Dead("core", "no room", ExitStatus.RESOURCES))
    add_child(supervisor, "core", "raise SystemExit(1)")
    with pytest.raises(StartError, match="^core: no room$") as raised:
        for _ in range(100):
            supervisor.check()
    assert raised.value.status == ExitStatus.RESOURCES


def test_a_killed_process_comes_before_reports_of_others(supervisor: Supervisor) -> None:
    send_messages(supervisor, Dead("worker 1", "the other rank is gone"), Dead("core", "worker 1 failed"))
    add_child(supervisor, "worker 0", "import os; os.kill(os.getpid(), 9)")
    add_child(supervisor, "worker 1", "raise SystemExit(1)")
    wait_for_ends(supervisor)
    assert check_until_raised(supervisor) == "worker 0: killed by SIGKILL"


def test_a_report_comes_before_an_aborted_process(supervisor: Supervisor) -> None:
    send_messages(supervisor, Dead("worker 1", "no such tensor"))
    add_child(supervisor, "worker 0", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    wait_for_ends(supervisor)
    assert check_until_raised(supervisor) == "worker 1: no such tensor"


def test_the_core_receives_why_a_worker_died(supervisor: Supervisor) -> None:
    add_child(supervisor, "core", "import time; time.sleep(60)")
    add_child(supervisor, "frontend", "import time; time.sleep(60)")
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as workers:
        workers.bind(supervisor.endpoint("workers"))
        supervisor.end_engine("worker 3: killed by SIGKILL")
        _, frame = workers.recv_multipart()
    context.term()
    assert Decoder[FromWorker](FromWorker).decode(frame) == WorkerFailed(3, "killed by SIGKILL")
    assert not supervisor.is_alive("core") and supervisor.is_alive("frontend")
    supervisor.check()  # the core's end is expected
    supervisor.stop_frontend(5, hurry=lambda: False)
    assert not supervisor.is_alive("frontend")
    supervisor.check()


def test_a_frontend_that_does_not_end_is_killed(supervisor: Supervisor) -> None:
    ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", ignore], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.read(1) == b"x"
        supervisor._children["frontend"] = Child("frontend", process)
        supervisor.stop_frontend(60, hurry=lambda: True)
    assert process.returncode == -9


def test_a_silent_core_is_hung_and_a_silent_frontend_is_logged(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    add_child(supervisor, "core", "import time; time.sleep(600)")
    add_child(supervisor, "frontend", "import time; time.sleep(600)")
    clock = [0.0]
    supervisor._monitor = PeerMonitor(60, lambda: clock[0])
    send_messages(supervisor, Heartbeat("frontend"), Heartbeat("core"))
    while not supervisor._receive(0.1):
        pass
    supervisor.check(wait_s=1)
    for _ in range(30):  # the frontend is silent for 60 s, the core sends heartbeats
        send_messages(supervisor, Heartbeat("core"))
        clock[0] += 2.0
        supervisor.check(wait_s=5)
    assert [record.message for record in caplog.records] == ["frontend has not responded for 10 s"]
    with pytest.raises(StartError, match="^core has not responded for 60 s$"):
        for _ in range(100):
            clock[0] += 2.0
            supervisor.check(wait_s=0)


def test_a_frontend_has_seconds_for_its_clients_after_the_second_signal(supervisor: Supervisor) -> None:
    code = (
        "import signal, sys, time\n"
        "got = []\n"
        "signal.signal(15, lambda *_: got.append(1))\n"
        "print('x', flush=True)\n"
        "while len(got) < 2: time.sleep(0.01)\n"
        "time.sleep(1.5)\n"
        "sys.exit(7)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.read(1) == b"x"
        supervisor._children["frontend"] = Child("frontend", process)
        calls = iter(range(100))
        supervisor.stop_frontend(60, hurry=lambda: next(calls) > 3)
    assert process.returncode == 7
