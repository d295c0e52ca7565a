"""Sessions and the rank of their last request."""

import pytest

from frontend.engine_client import session_table
from frontend.engine_client.session_table import SessionTable


def test_the_last_request_counts_until_its_engine_ends() -> None:
    table = SessionTable(2)
    assert table.find(5) is None
    table.put(5, 1, 100)
    table.put(6, 0, 7)
    assert (table.find(5), table.find(6)) == ((1, 100), (0, 7))
    table.forget(1)
    assert (table.find(5), table.find(6)) == (None, (0, 7))
    table.put(5, 1, 30)
    assert table.find(5) == (1, 30)


def test_the_oldest_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_table, "_MOST_SESSIONS", 3)
    table = SessionTable(1)
    for session in (1, 2, 3, 1, 4):
        table.put(session, 0, 1)
    assert len(table) == 3 and table.find(2) is None and table.find(1) == (0, 1)
