"""Silence of peers, measured with a fake clock."""

import pytest
import zmq

from atom.shared.messages.supervisor import Heartbeat
from atom.shared.utils.liveness import (
    HeartbeatSender,
    PeerMonitor,
    SilenceTimer,
    heartbeat_interval,
    worker_monitor,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pass_time(monitor: PeerMonitor, clock: Clock, seconds: float) -> None:
    for _ in range(round(seconds * 4)):
        clock.now += 0.25
        monitor.update()


def test_a_silent_peer_becomes_unresponsive_then_hung_and_recovers(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    monitor = PeerMonitor(60, clock)
    monitor.seen("worker 0")
    monitor.update()
    pass_time(monitor, clock, 9.75)
    assert (monitor.unresponsive, monitor.hung()) == ("", "")
    clock.now += 0.25
    assert monitor.update(), "the change is reported"
    assert monitor.unresponsive == "worker 0 has not responded for 10 s"
    pass_time(monitor, clock, 49.75)
    assert monitor.hung() == ""
    pass_time(monitor, clock, 0.25)
    assert monitor.hung() == "worker 0 has not responded for 60 s"
    monitor.seen("worker 0")
    assert monitor.update()
    assert (monitor.unresponsive, monitor.hung()) == ("", "")
    assert [record.message for record in caplog.records] == [
        "worker 0 has not responded for 10 s",
        "worker 0 responds again after 60 s",
    ]


@pytest.mark.parametrize(
    ("timeout", "collective", "warned", "hung"),
    [(60, False, 10, 60), (60, True, 3.5, 7), (6, True, 1, 6)],
)
def test_a_worker_of_a_collective_hangs_earlier(
    timeout: float, collective: bool, warned: float, hung: float
) -> None:
    clock = Clock()
    monitor = worker_monitor(timeout, collective)
    monitor._clock = clock
    monitor.seen("worker 0")
    monitor.update()
    pass_time(monitor, clock, warned - 0.25)
    assert not monitor.unresponsive
    pass_time(monitor, clock, 0.25)
    assert monitor.unresponsive and not monitor.hung()
    pass_time(monitor, clock, hung - warned - 0.25)
    assert not monitor.hung()
    pass_time(monitor, clock, 0.25)
    assert monitor.hung()


def test_time_in_which_the_monitor_did_not_run_hardly_counts() -> None:
    clock = Clock()
    monitor = PeerMonitor(60, clock)
    monitor.seen("worker 0")
    monitor.update()
    clock.now += 1000.0
    assert not monitor.update() and monitor.unresponsive == ""
    timer = SilenceTimer(1.0, clock)
    clock.now += 1000.0
    assert timer.update(seen=False) == 1.0


def test_unread_beats_do_not_pile_up() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as reader:
        port = reader.bind_to_random_port("tcp://127.0.0.1")
        heartbeats = HeartbeatSender(
            context, zmq.PUSH, f"tcp://127.0.0.1:{port}", lambda: Heartbeat("core"), 0.0
        )
        for _ in range(20_000):
            heartbeats.send_if_due()  # never waits
        received = 0
        assert reader.poll(60_000)
        while reader.poll(200):
            reader.recv()
            received += 1
        heartbeats.close()
    assert 0 < received < 20_000


@pytest.mark.parametrize(("timeout", "interval"), [(60.0, 1.0), (600.0, 1.0), (6.0, 0.1)])
def test_beats_are_far_more_frequent_than_the_warning(timeout: float, interval: float) -> None:
    assert heartbeat_interval(timeout) == pytest.approx(interval)
