"""What tests of speculation share."""

import pytest

from workers.spec_decode import draft_costs


@pytest.fixture(autouse=True)
def estimated_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take no time by the clock: what drafts cost is estimated, so that their number does not vary."""
    monkeypatch.setattr(draft_costs, "clock", lambda: 0.0)
