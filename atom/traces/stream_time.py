"""The time of each kernel where kernels of one stream overlap.

A kernel that is launched early (programmatic dependent launch) waits on the device for the one
before it, and its duration counts the wait: the durations of a step may add up to several times
what it took. So a kernel's time begins where those before it on its stream have ended.
"""

from collections.abc import Hashable, Iterable


def times_without_waiting(runs: Iterable[tuple[Hashable, int, int]]) -> list[int]:
    """Of runs (stream, begin, end) by their begin: from the end of all before on the stream, at least 0.

    They add up to the time in which the streams were busy.
    """
    busy_until: dict[Hashable, int] = {}
    times = []
    for stream, begin, end in runs:
        before = busy_until.get(stream, begin)
        times.append(max(0, end - max(begin, before)))
        busy_until[stream] = max(before, end)
    return times
