"""How long the frontend's event loop was held, from its histogram in /metrics."""

import re

Buckets = list[tuple[float, float]]
"""(upper bound in seconds, values so far up to that bound)."""
_BUCKET = re.compile(r'^atom:event_loop_lag_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', re.MULTILINE)


def lag_buckets(metrics: str) -> Buckets:
    """The histogram's buckets in the text of /metrics."""
    return [(float(bound), float(count)) for bound, count in _BUCKET.findall(metrics)]


def longest_hold(before: Buckets, after: Buckets) -> float:
    """The upper bound of the highest bucket with a new value, in seconds."""
    new = [(bound, count - old) for (bound, count), (_, old) in zip(after, before, strict=True)]
    return next(bound for bound, count in new if count == new[-1][1])
