"""What is written of the last steps when an engine dies."""

import logging
import stat
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from atom.shared.config.engine import EngineConfig
from atom.shared.config.observability import ObservabilityConfig
from atom.shared.messages.codec import encode
from atom.shared.messages.engine import LogitsProcessors, pack_ids
from atom.shared.messages.flight_record import FlightRecord
from atom.shared.messages.launch import CoreLaunch
from atom.shared.messages.worker import FullAttentionSpec
from engine_core import flight_recorder
from engine_core.flight_recorder import FlightRecorder
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import GREEDY, CoreDriver
from tests.helpers.servers.domains import CHECKPOINT

FULL = FullAttentionSpec(block_size=4, bytes_per_block=1)
BIASED = msgspec.structs.replace(GREEDY, logits_processors=LogitsProcessors(bad_words=[[1, 2]]))


def recorder(mode: str) -> FlightRecorder:
    config = replace(EngineConfig(), observability=ObservabilityConfig(flight_recorder=mode))  # type: ignore[arg-type]
    return FlightRecorder(CoreLaunch(config, CHECKPOINT, "", "", "", 0, data_parallel_rank=3))


def driven(made: FlightRecorder, steps: int = 2) -> CoreDriver:
    """A core with a replayed request and others, the last step in flight."""
    run = CoreDriver([FULL], [64], Limits(2, 16), max_model_len=64)
    run.add(1, range(5), max_tokens=6, name="first", sampling=BIASED)
    run.add(2, range(3), max_tokens=6, name="second", replays=2)
    run.add(3, range(2), max_tokens=6, name="waits")
    for left in reversed(range(steps)):
        batch = run.core.schedule()
        assert batch is not None
        made.sent(encode(batch))
        if left:
            run.core.update_from_output(run.worker.execute(batch))
    return run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path))
    return tmp_path / "flights"


def test_lengths_and_parameters_but_no_token(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = recorder("shapes")
    with caplog.at_level(logging.ERROR):
        made.write(driven(made).core, "worker 0: killed", False)
    (path,) = cache.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and str(path) in caplog.text
    record = msgspec.json.decode(path.read_bytes(), type=FlightRecord)
    assert (record.engine, record.reason, record.is_hang) == (3, "worker 0: killed", False)
    assert record.suspects == ["second", "first"] and record.num_in_flight == 1
    assert [each.step for each in record.steps] == [1, 2] and len(record.steps[0].new_rows) == 2
    first, second, waits = sorted(record.requests, key=lambda each: each.name)
    assert (first.prompt_tokens, first.generated_tokens, first.max_tokens) == (5, 1, 6)
    assert first.in_flight and second.replays == 2 and waits.status == "waiting" and waits.row == -1
    assert not any(each.prompt_ids or each.output_ids for each in record.requests)
    assert all(each.sampling.logits_processors is None for each in record.requests)


def test_with_ids_the_requests_are_whole(cache: Path) -> None:
    made = recorder("ids")
    record = made.record(driven(made).core, "x", True)
    first = next(each for each in record.requests if each.name == "first")
    assert first.prompt_ids == pack_ids(range(5)) and len(first.output_ids) == 4
    assert first.sampling == BIASED
    assert not cache.exists()


def test_the_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "_MOST_REQUESTS", 2)
    monkeypatch.setattr(flight_recorder, "_MOST_ID_BYTES", 30)
    made = recorder("ids")
    core = driven(made, steps=5).core
    for _ in range(200):
        assert made.last is not None
        made.sent(encode(made.last))
    record = made.record(core, "x", False)
    assert len(record.steps) == 64 and record.num_requests == 3
    assert [bool(each.prompt_ids) for each in record.requests] == [False, False]


@pytest.mark.parametrize("mode, steps", [("off", 2), ("shapes", 0)])
def test_nothing_is_written_if_it_is_off_or_no_step_was_sent(cache: Path, mode: str, steps: int) -> None:
    made = recorder(mode)
    made.write(driven(made, steps).core, "x", False)
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ATOM_CACHE_DIR", "/proc/1/no-home")
    made = recorder("shapes")
    with caplog.at_level(logging.ERROR):
        made.write(driven(made).core, "x", False)
    assert "the flight record cannot be written" in caplog.text
