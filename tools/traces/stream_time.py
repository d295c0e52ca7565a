"""The time of each kernel where kernels of one stream overlap.

With PDL (programmatic dependent launch) a kernel starts early and waits on the device for the
previous one; its recorded duration includes the wait. So a kernel's time is counted from the end of
the previous kernels of its stream.
"""

from collections.abc import Hashable, Iterable


def times_without_waiting(runs: Iterable[tuple[Hashable, int, int]]) -> list[int]:
    """The time of each run (stream, begin, end), sorted by begin, without overlap; at least 0.

    The times of a stream add up to the time in which it was busy.
    """
    busy_until: dict[Hashable, int] = {}
    times = []
    for stream, begin, end in runs:
        before = busy_until.get(stream, begin)
        times.append(max(0, end - max(begin, before)))
        busy_until[stream] = max(before, end)
    return times
