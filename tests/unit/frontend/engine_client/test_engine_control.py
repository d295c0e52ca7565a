"""The log level that an administrator sets reaches every engine, also those that start later."""

import itertools
from types import SimpleNamespace
from typing import Any

from atom.shared.messages.admin import SetLogLevel
from frontend.engine_client.engine_control import EngineControl
from frontend.engine_client.engine_link import LinkState


def engine() -> Any:
    sent: list[Any] = []
    return SimpleNamespace(sent=sent, link=SimpleNamespace(state=LinkState.READY, send=sent.append))


def test_an_engine_keeps_its_own_level_until_another_is_set() -> None:
    first, later, last = engine(), engine(), engine()
    control = EngineControl([first], itertools.count())  # type: ignore[arg-type]
    control.connected(first)
    assert first.sent == [] and control.log_level is None
    control.log_level = "debug"
    control.connected(later)
    assert first.sent == later.sent == [SetLogLevel("debug")]
    control.log_level = "info"  # engines may have been started with another one
    control.connected(last)
    assert first.sent[1:] == last.sent == [SetLogLevel("info")]
