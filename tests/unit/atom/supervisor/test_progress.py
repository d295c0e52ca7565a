import logging

import pytest

from atom.shared.messages.supervisor import Progress
from atom.supervisor import progress as progress_module
from atom.supervisor.progress import ProgressBars


def test_without_a_terminal_a_long_phase_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line at intervals, with what is left, and one at the end; no bar."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    bars = ProgressBars()
    with caplog.at_level(logging.INFO):
        for done in range(5):
            bars.update(Progress("worker 0", "loading weights", done, 4))
            now[0] += 8.0
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 50 %, about 16 s left",
        "loading weights: 4 done in 32.0 s",
    ]


def test_a_phase_that_jumps_to_its_end_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    bars = ProgressBars()
    with caplog.at_level(logging.INFO):
        bars.update(Progress("worker 0", "capturing graphs", 3, 3))
    assert len(caplog.records) == 1 and "3 done" in caplog.text
