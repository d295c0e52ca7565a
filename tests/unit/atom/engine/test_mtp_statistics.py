"""Figures of speculative decoding."""

import msgspec

from atom.engine.mtp_statistics import mtp_statistics, mtp_text
from atom.shared.messages.engine import CoreStats

OFF = CoreStats(9, 0, 0, 0, 100, 0, 0, 0, 0, 0, 8, 1, 1)


def test_figures() -> None:
    stats = msgspec.structs.replace(
        OFF, num_drafts=20, num_draft_tokens=60, num_accepted_tokens_per_pos=[17, 9, 4]
    )
    figures = mtp_statistics(stats)
    assert figures == {
        "enabled": True,
        "total_draft_tokens": 60,
        "total_accepted_tokens": 30,
        "acceptance_rate": 0.5,
        "average_tokens_per_forward": 2.5,
        "distribution": {0: 3, 1: 8, 2: 5, 3: 4},
    }
    assert mtp_text(figures).splitlines()[1:3] == [
        "accepted tokens             30 (50.0%)",
        "tokens per forward          2.50",
    ]


def test_without_drafts() -> None:
    assert not mtp_statistics(OFF)["enabled"] and "is off" in mtp_text(mtp_statistics(OFF))
    idle = mtp_statistics(msgspec.structs.replace(OFF, num_accepted_tokens_per_pos=[0, 0]))
    assert (idle["enabled"], idle["acceptance_rate"], idle["average_tokens_per_forward"]) == (True, 0.0, 1.0)
    assert idle["distribution"] == {0: 0, 1: 0, 2: 0}
    assert len(mtp_text(idle).splitlines()) == 6
