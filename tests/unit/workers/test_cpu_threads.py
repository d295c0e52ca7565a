"""The number of threads follows what other programs leave of the CPUs."""

import pytest
import torch

from workers.cpu_threads import CpuThreads

HZ = 100


class Machine:
    """A number of CPUs whose counters are moved by hand."""

    def __init__(self, cpus: int):
        self.cpus = cpus
        self.now = 100.0
        self.own = 5.0
        self.idle = [0.0] * cpus
        self.busy = 0.0
        self.counts = True
        self.set: list[int] = []

    def stat(self) -> str:
        lines = [f"cpu{at} 0 0 0 {round(idle * HZ)} 0 0 0 0 0 0" for at, idle in enumerate(self.idle)]
        lines[0] = lines[0].replace(" 0", f" {round(self.busy * HZ)}", 1)
        return "\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 12", "cpu99 0 0 0 9999999 0 0 0 0 0 0"])

    def run(self, seconds: float, own: float, others: float) -> None:
        """`own` and `others` are numbers of CPUs in use."""
        self.now += seconds
        self.own += own * seconds
        if not self.counts:
            return
        self.busy += (own + others) * seconds
        self.idle[0] += (self.cpus - own - others) * seconds

    def threads(self, most: int) -> CpuThreads:
        return CpuThreads(
            most, range(self.cpus), self.stat, lambda: (self.now, self.own), set_threads=self.set.append
        )


@pytest.mark.parametrize(
    ("cpus", "own", "others", "expected"),
    [
        (2, 2.0, 0.0, 2),
        (2, 1.7, 0.3, 2),  # the frontend and the core
        (2, 1.33, 0.67, 1),  # another program's share next to two threads of ours
        (2, 1.0, 1.0, 1),
        (2, 0.67, 1.33, 1),
        (2, 0.0, 2.0, 1),
        (8, 7.1, 0.9, 7),
        (8, 4.0, 4.0, 4),
        (8, 0.0, 0.0, 8),  # nothing ran
    ],
)
def test_threads_are_as_many_as_cpus_are_free(cpus: int, own: float, others: float, expected: int) -> None:
    machine = Machine(cpus)
    threads = machine.threads(cpus)
    threads.adjust()
    machine.run(1.0, own, others)
    threads.adjust()
    assert threads.num_threads == expected
    assert machine.set == ([] if expected == cpus else [expected])


def test_they_come_back_when_the_others_have_ended() -> None:
    machine = Machine(2)
    threads = machine.threads(2)
    threads.adjust()
    for own, others in [(1.3, 0.7), (1.0, 1.0), (1.0, 0.2), (1.8, 0.2)]:
        machine.run(0.5, own, others)
        threads.adjust()
    assert machine.set == [1, 2]


def test_counters_that_stand_still_change_nothing() -> None:
    machine = Machine(2)
    machine.counts = False
    threads = machine.threads(2)
    for own in (0.0, 1.0, 2.0):
        threads.adjust()
        machine.run(1.0, own, 0.0)
    threads.adjust()
    assert not machine.set


def test_nothing_is_read_between_two_measurements() -> None:
    machine = Machine(2)
    threads = machine.threads(2)
    threads.adjust()
    machine.run(0.01, 0.5, 1.5)
    threads.adjust()
    assert not machine.set


def test_the_machine_s_own_file_is_read() -> None:
    before = torch.get_num_threads()
    threads = CpuThreads(1, {0})
    threads.adjust()
    idle_s, all_s = threads._counted()
    assert 0 < idle_s < all_s
    assert torch.get_num_threads() == before
