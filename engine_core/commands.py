"""Responses to the questions and commands of frontends."""

from collections.abc import Iterator

from atom.shared.messages.admin import (
    AbortNamed,
    Answer,
    Done,
    GetRequests,
    Question,
    RequestInfos,
    ResetPrefixCache,
)
from atom.shared.messages.engine import TokenDeltas
from engine_core.core import EngineCore


def responses(
    core: EngineCore, asker: bytes, message: Question
) -> Iterator[tuple[bytes, TokenDeltas | Answer]]:
    """What to send to which frontends: ends of aborted sequences, and the response to `asker`."""
    match message:
        case GetRequests(number, name):
            total, requests = core.requests(name)
            yield asker, RequestInfos(number, total, requests)
        case AbortNamed(number, names, everything, tenant):
            count, ends = core.abort_named(None if everything else set(names), tenant)
            yield from ends.items()
            yield asker, Done(number, count)
        case ResetPrefixCache(number):
            yield asker, Done(number, core.reset_prefix_cache())
