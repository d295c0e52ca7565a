"""The rings of points: their means and percentiles, their length and their memory."""

import tracemalloc

import pytest

from frontend.metrics.metrics import Metrics
from frontend.status.history import MAX_POINTS, RANGES, History
from frontend.status.records import Rank


def rank(decode: float) -> Rank:
    return Rank(0, 0, "ready", "", running=2, decode=decode)


def test_a_point_of_a_long_range_has_the_mean_of_its_looks() -> None:
    history, metrics = History(), Metrics()
    metrics.engine(0)
    for second in range(1, 25):
        history.add(float(second), [rank(float(second))], metrics)
    assert [point.at for point in history.points("1h")] == [12.0, 24.0]
    assert [point.decode for point in history.points("1h")] == [6.5, 18.5]
    assert len(history.points("5m")) == 24 and history.points("6h") == []


def test_requests_and_errors_are_counted_per_second() -> None:
    history, metrics = History(), Metrics(responses={200: 5, 404: 7})
    engine = metrics.engine(0)
    engine.finish_reasons = {"stop": 100}
    assert history.add(10.0, [], metrics).requests == 0  # counted before the first look
    engine.finish_reasons = {"stop": 104, "error": 2}
    metrics.responses = {200: 9, 404: 8, 500: 1}
    point = history.add(12.0, [], metrics)
    assert (point.requests, point.errors) == (3.0, 1.0)
    engine.finish_reasons = {}  # the figures of another frontend are missing
    assert history.add(13.0, [], metrics).requests == 0
    engine.finish_reasons = {"stop": 5}
    assert history.add(13.0, [], metrics).requests == pytest.approx(5000)  # the clock was set back


def test_percentiles_of_a_long_range_are_those_of_its_looks() -> None:
    history, metrics = History(), Metrics()
    queue = metrics.engine(0).queue_time
    queue.observe(100.0)  # before the first look
    history.add(0.0, [], metrics)
    for second in range(1, 12):
        queue.observe(0.015)
        history.add(float(second), [], metrics)
    (point,) = history.points("1h")
    assert point.queue is not None and 0.01 < point.queue[0] < point.queue[2] <= 0.02
    for second in range(12, 24):
        history.add(float(second), [], metrics)
    assert history.points("1h")[-1].queue is None


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for looks, name in enumerate(RANGES, 1):  # fewer than there are, so that the rings fill sooner
        monkeypatch.setitem(RANGES, name, looks)
    history, metrics = History(), Metrics()
    engine = metrics.engine(0)
    tracemalloc.start()
    try:
        for second in range(MAX_POINTS * max(RANGES.values()) + 100):
            for histogram in (engine.time_to_first_token, engine.inter_token, engine.queue_time):
                histogram.observe(0.0123)
            history.add(second + 0.5, [rank(second / 7)], metrics)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(history.points(name)) for name in RANGES] == [MAX_POINTS] * 3
    assert size < 1 << 20
