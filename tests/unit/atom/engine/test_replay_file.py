from pathlib import Path

import msgspec
import pytest

from atom.engine.replay_file import Outcome, _count, _merged, _Runs, read_record, replayed_request
from atom.shared.config.cli import ConfigError
from atom.shared.config.engine import EngineConfig
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.scheduler import SchedulerConfig
from atom.shared.messages.engine import (
    CoreDead,
    Finished,
    FinishReason,
    Sampling,
    TokenDeltas,
    pack_ids,
    unpack_ids,
)
from atom.shared.messages.flight_record import FORMAT, FlightRecord, RecordedRequest

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


def request(name: str = "r", **changes: object) -> RecordedRequest:
    made = RecordedRequest(name, 0, "decoding", 0, True, 5, 3, 90, 0, 0, 0, False, GREEDY)
    return msgspec.structs.replace(made, **changes)


def record(*requests: RecordedRequest, config: EngineConfig = EngineConfig()) -> FlightRecord:  # noqa: B008
    return FlightRecord(
        FORMAT, "1", "now", "why", False, 0, "X", False, [], 0, len(requests), list(requests), [], config
    )


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = record(request(prompt_ids=pack_ids(range(5))))
    assert read_record(write(tmp_path / "file", msgspec.json.encode(made))) == made


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "no flight record"),
        (b"\x80\x04pickle", "no flight record"),
        (b'{"format": 1}', "missing required field"),
        (msgspec.json.encode(msgspec.structs.replace(record(), format=99)), "its format is 99"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = write(tmp_path / "file", content)
    with pytest.raises(ConfigError, match=f"^--replay-file {path}: .*{reason}"):
        read_record(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_record(tmp_path / "nowhere")


def test_a_request_goes_on_from_the_tokens_that_it_had() -> None:
    one = request(prompt_ids=pack_ids(range(5)), output_ids=pack_ids([7, 8, 9]))
    made = replayed_request(record(one), 4, one, 100)
    assert made.request_ids == [4] and made.prompt_length == 5 and made.max_tokens == 3 + 64
    assert list(unpack_ids(made.prompt_ids)) == [0, 1, 2, 3, 4, 7, 8, 9]


def test_without_ids_they_are_made_up_within_the_vocabulary() -> None:
    one = request(generated_tokens=0, max_tokens=10)
    made = replayed_request(record(one), 1, one, 6)
    assert made.prompt_length == 0 and made.max_tokens == 10
    ids = unpack_ids(made.prompt_ids)
    assert len(ids) == 5 and all(3 <= each < 6 for each in ids)


def test_one_engine_of_the_recorded_settings_with_those_given_now() -> None:
    recorded = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=7), parallel=ParallelConfig(data_parallel_size=4)
    )
    given = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=11))
    merged = _merged(record(config=recorded), given, {"max_num_batched_tokens"})
    assert (merged.scheduler.max_num_seqs, merged.scheduler.max_num_batched_tokens) == (7, 11)
    assert merged.parallel.data_parallel_size == 1 and merged.observability.flight_recorder == "off"
    nodes = EngineConfig(parallel=ParallelConfig(nnodes=2))
    with pytest.raises(ConfigError, match="several nodes"):
        _merged(record(config=nodes), EngineConfig(), set())


def test_what_comes_is_counted() -> None:
    outcome = Outcome()
    names = {1: "a", 2: "b"}
    ends = [Finished(1, FinishReason.MAX_TOKENS), Finished(2, FinishReason.ERROR, message="bad")]
    _count(TokenDeltas(1, [1, 2], pack_ids([5, 6]), finished=ends), names, outcome)
    _count(CoreDead("gone"), names, outcome)
    assert outcome == Outcome("gone", 2, 2, {"b": "bad"}) and not names


@pytest.mark.parametrize("guilty", range(5))
def test_halving_finds_the_request_that_ends_an_engine(guilty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(str(number)) for number in range(5)]
    runs = _Runs(record(*requests), EngineConfig(), set(), lambda: None)
    count = [0]

    def once(part: list[RecordedRequest]) -> Outcome:
        count[0] += 1
        return Outcome("dead" if requests[guilty] in part else "")

    monkeypatch.setattr(runs, "once", once)
    assert runs.search(requests) == [requests[guilty]] and count[0] <= 6


def test_requests_that_end_an_engine_together_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(str(number)) for number in range(4)]
    runs = _Runs(record(*requests), EngineConfig(), set(), lambda: None)
    monkeypatch.setattr(runs, "once", lambda part: Outcome("dead" if len(part) > 2 else ""))
    assert runs.search(requests) == requests
