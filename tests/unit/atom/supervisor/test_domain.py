"""Lives of a domain, and the delays between them."""

import errno
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from atom.shared.config.engine import EngineConfig
from atom.shared.config.reliability import ReliabilityConfig
from atom.shared.messages.supervisor import Ready
from atom.supervisor import failure as failure_module
from atom.supervisor.domain import DomainSettings
from atom.supervisor.failure import STABLE_S, Failure, Restarts
from tests.helpers.servers.domains import SLEEP, ScriptDomain, send, settings_in, zmq_context

FAILURE = Failure("out of luck", "core: out of luck")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DomainSettings]:
    monkeypatch.setattr(failure_module, "FIRST_DELAY_S", 0.05)
    with zmq_context() as context:
        config = EngineConfig(reliability=ReliabilityConfig(max_restarts=2))
        yield settings_in(tmp_path, context, config)


def wait_until_due(domain: ScriptDomain) -> None:
    begun = time.monotonic()
    while not domain.is_due:
        assert time.monotonic() - begun < 60
        time.sleep(0.001)


def test_delays_double_up_to_half_a_minute() -> None:
    restarts = Restarts(8)
    assert [restarts.delay(0) for _ in range(9)] == [1, 2, 4, 8, 16, 30, 30, 30, None]


def test_a_minute_of_readiness_begins_anew() -> None:
    restarts = Restarts(2)
    assert [restarts.delay(STABLE_S - 1) for _ in range(3)] == [1, 2, None]
    assert [restarts.delay(STABLE_S), restarts.delay(0), restarts.delay(0)] == [1, 2, None]


def test_none_is_allowed() -> None:
    assert Restarts(0).delay(1e9) is None


def test_a_failed_domain_is_down_for_the_delay_and_lives_again(settings: DomainSettings) -> None:
    domain = ScriptDomain("engine 1", settings)
    domain.start()
    first = domain.life
    assert first is not None and first.is_alive and domain.number == 0
    failed_at = time.monotonic()
    domain.fail(FAILURE, restart=True)
    assert domain.life is None and not domain.is_over and not first.is_alive
    assert domain.exit_reasons == ["core: out of luck"]
    assert not first.directory.exists()
    wait_until_due(domain)
    assert time.monotonic() - failed_at >= failure_module.FIRST_DELAY_S
    domain.restart()
    assert not domain.is_due and domain.number == 1
    assert domain.life is not None and domain.life.is_alive and domain.life.directory != first.directory
    domain.close()
    assert list(Path(settings.local.run_dir).iterdir()) == []


def test_every_restart_and_its_end_are_logged(
    settings: DomainSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    domain = ScriptDomain("engine 1", settings)
    domain.start()
    for _ in range(2):
        domain.fail(FAILURE, restart=True)
        wait_until_due(domain)
        domain.restart()
    assert domain.life is not None
    send(domain.life, Ready("core"))
    domain.life.receive()
    assert domain.failure() is None and domain.failure() is None
    domain.fail(FAILURE, restart=True)
    assert domain.is_over
    messages = [record.message for record in caplog.records]
    assert messages[0] == "engine 1, life 0, has ended: core: out of luck; life 1 starts in 0 s"
    assert re.fullmatch(r"engine 1, life 2, is ready after \d+\.\d s.*", messages[2])
    assert messages[3].endswith("core: out of luck; not started again after 2 restarts in a row")
    assert len(messages) == 4


def test_without_a_restart_it_is_over(settings: DomainSettings) -> None:
    domain = ScriptDomain("engine", settings)
    domain.start()
    domain.fail(FAILURE, restart=False)
    assert domain.is_over and domain.last_failure == FAILURE


def test_a_domain_that_waits_can_be_kept_down(settings: DomainSettings) -> None:
    domain = ScriptDomain("engine", settings)
    domain.start()
    domain.fail(FAILURE, restart=True)
    domain.stay_down()
    assert domain.is_over and not domain.is_due


@pytest.mark.parametrize("error", [OSError("no memory"), zmq.ZMQError(errno.EMFILE, "no memory")])
def test_a_start_without_a_process_is_a_failure(
    settings: DomainSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    domain = ScriptDomain("engine", settings)
    domain.start()
    domain.fail(FAILURE, restart=True)
    monkeypatch.setattr(domain, "_launch", lambda life: (_ for _ in ()).throw(error))
    domain.restart()
    assert domain.life is None and not domain.is_over
    assert "engine, life 1, has ended: engine cannot be started: no memory" in caplog.text
    monkeypatch.undo()
    wait_until_due(domain)
    domain.restart()
    assert domain.number == 2 and domain.life is not None
    domain.close()


def test_its_process_may_end_by_itself(settings: DomainSettings) -> None:
    domain = ScriptDomain("engine", settings, ["raise SystemExit(5)", SLEEP])
    domain.start()
    for _ in range(1200):
        if failure := domain.failure():
            break
        time.sleep(0.05)
    assert failure is not None and failure.text == "core: ended with exit status 5"
    domain.close()
