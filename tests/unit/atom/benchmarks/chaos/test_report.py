from atom.benchmarks.chaos.report import Report, judge
from atom.benchmarks.chaos.streams import ClientStream

NAME = ("worker", "R1", "SIGKILL of a worker")


def stream(
    *times: float, sent: float | None = None, ids: tuple[int, ...] = (), error: str = ""
) -> ClientStream:
    return ClientStream(times[0] if sent is None else sent, [*(ids or range(len(times)))], [*times], 0, error)


def report(*streams: ClientStream, events: tuple[float, ...] = (1.5,)) -> Report:
    return judge(NAME, [stream(0, 1, 2, 3)] * len(streams), streams, events)


def test_equal_tokens_pass_whatever_the_pauses() -> None:
    found = report(stream(0, 1, 6, 7), stream(0, 1, 1.6, 1.7), stream(2, 3, 4, 5))
    assert found.problems == [] and (found.streams, found.failed, found.differing) == (3, 0, 0)
    assert (found.median_pause_s, found.longest_pause_s) == (4.5, 4.5)  # the last one was sent later
    assert sum(found.pauses) == 2 and "passed" in found.text()


def test_a_wait_for_the_first_token_is_a_pause() -> None:
    assert report(stream(4, 5, 6, 7, sent=1)).longest_pause_s == 2.5


def test_each_fault_of_a_stream_is_a_problem() -> None:
    found = report(stream(0, 1, 2, 3, ids=(0, 1, 2, 4)), stream(0, 1, error="404: unknown"))
    assert (found.failed, found.differing) == (1, 1)
    failed, differing = found.problems
    assert failed == "a stream failed: 404: unknown"
    assert differing.startswith("1 streams got other tokens than undisturbed ones; ")
    assert "--dtype float32" in differing and "--batch-invariant" in differing
    assert "FAILED" in found.text()


def test_without_an_event_nothing_is_proven() -> None:
    assert "no event took place" in report(stream(0, 1, 2, 3), events=()).problems[0]


def test_a_flood_may_be_refused_with_retry_after_alone() -> None:
    outcomes = {"200": 5, "429": 7, "429 without Retry-After": 1, "500": 2}
    found = judge(NAME, [stream(0, 3)], [stream(0, 3)], [1.0], outcomes=outcomes)
    assert found.problems == [
        "1 requests ended with: 429 without Retry-After",
        "2 requests ended with: 500",
    ]


def test_frontends_must_not_grow() -> None:
    found = judge(NAME, [stream(0, 3)], [stream(0, 3)], [1.0], grown_bytes=60 << 20)
    assert found.problems == ["the frontends have grown by 60 MiB"]
