"""A start that was cancelled."""

import asyncio
from unittest.mock import Mock

import pytest

from atom.engine import engine_service
from atom.engine.engine_service import EngineService
from atom.shared.config.engine import EngineConfig
from atom.supervisor import StartError


@pytest.mark.parametrize("fails", [True, False])
def test_a_start_that_was_cancelled_is_no_death(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it has come to its end just then."""
    supervisor = Mock(engines=[])
    monkeypatch.setattr(engine_service, "Supervisor", lambda *_: supervisor)
    monkeypatch.setattr(engine_service, "EngineHost", Mock())
    on_death = Mock()
    service = EngineService(EngineConfig(), set(), on_death=on_death)

    async def start_and_cancel() -> list[object]:
        loop = asyncio.get_running_loop()
        problems: list[object] = []
        loop.set_exception_handler(lambda _, context: problems.append(context))
        starting = asyncio.create_task(service.start())

        def wait_ready() -> None:
            loop.call_soon_threadsafe(starting.cancel)
            assert service._stop.wait(20)
            if fails:
                raise StartError("the start was interrupted")

        supervisor.wait_ready.side_effect = wait_ready
        with pytest.raises(asyncio.CancelledError):
            await starting
        await service.close()
        await asyncio.sleep(0)  # for what the thread has left to do
        return problems

    assert asyncio.run(start_and_cancel()) == []
    assert not service.death and not on_death.called and not caplog.records
