"""One line each thousand draft tokens, and not more than one in ten seconds."""

from collections import Counter

import pytest

from atom.shared.utils.logger import get_logger
from engine_core.batch.draft_log import DRAFTS_PER_LINE, SECONDS_PER_LINE, DraftLog
from engine_core.stats import Counters
from tests.helpers.engine.core_driver import Clock


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(get_logger(), "info", lambda text, *values: found.append(text % values))
    return found


def test_a_line_each_thousand_drafts(lines: list[str]) -> None:
    clock = Clock()
    log = DraftLog(clock)
    counters = Counters(num_drafts=249, num_draft_tokens=DRAFTS_PER_LINE - 1)
    log.update(counters)
    assert not lines
    counters = Counters(num_drafts=250, num_draft_tokens=1000, num_accepted=Counter({4: 100, 1: 50}))
    log.update(counters)
    assert lines == [
        "drafts: 450 of 1000 tokens accepted (45.0 %), 2.80 tokens a step; in all 450 of 1000 (45.0 %)"
    ]
    counters = Counters(num_drafts=500, num_draft_tokens=2000, num_accepted=Counter({4: 100, 1: 100}))
    log.update(counters)
    assert len(lines) == 1
    clock.now += SECONDS_PER_LINE
    log.update(counters)
    assert lines[1:] == [
        "drafts: 50 of 1000 tokens accepted (5.0 %), 1.20 tokens a step; in all 500 of 2000 (25.0 %)"
    ]
    log.update(counters)
    assert len(lines) == 2
