"""Copies of KV blocks, by a copier that confirms them one poll later."""

import pytest

from atom.shared.messages.kv_tiers import BlocksCopied, CopyBlocks
from benchmarks.kv_tiers import Copies, steps_with


class Copier:
    def __init__(self, failed: list[int] | None = None):
        self.asked: list[CopyBlocks] = []
        self._failed = failed or []
        self._polls = 0

    def submit(self, message: CopyBlocks) -> None:
        assert not self._polls, "the copies before are not confirmed"
        self.asked.append(message)
        self._polls = 2

    def next_copied(self) -> BlocksCopied | None:
        if not self._polls:
            return None
        self._polls -= 1
        return None if self._polls else BlocksCopied(0, self.asked[-1].number, self._failed)


class Steps:
    """Counts the steps."""

    launched = 0

    def launch(self) -> "Steps":
        self.launched += 1
        return self

    def result(self) -> None: ...


def copies_of(copier: Copier) -> Copies:
    return Copies(copier, num_blocks=10, count=3, block_bytes=1000)  # type: ignore[arg-type]


def test_blocks_of_the_end_of_the_cache_and_their_rate() -> None:
    copier = Copier()
    assert copies_of(copier).rate(up=True) > 0
    (asked,) = copier.asked
    assert asked.is_load and [(copy.block, copy.slot) for copy in asked.copies] == [(9, 0), (8, 1), (7, 2)]


def test_blocks_that_fail_end_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="2 blocks could not be copied"):
        copies_of(Copier(failed=[0, 2])).rate(up=False)


def test_copies_go_on_while_steps_run() -> None:
    copier, steps = Copier(), Steps()
    milliseconds, rate = steps_with(steps, copies_of(copier), up=False, count=6)  # type: ignore[arg-type]
    assert steps.launched == 7 and milliseconds > 0 and rate > 0
    assert [asked.number for asked in copier.asked] == [1, 2, 3, 4]
    assert steps_with(steps, copies_of(Copier()), up=None, count=2)[1] == 0  # type: ignore[arg-type]
