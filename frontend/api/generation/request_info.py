"""What the engine cores report of requests, in the form of the API."""

from collections.abc import Iterable
from typing import Literal

from atom.shared.messages.admin import Miss, RequestInfo, RequestInfos, RequestStatus
from atom.shared.messages.engine import FinishReason
from frontend.api.schemas.request_info import CacheMiss, RequestList, RequestReport, SequenceReport
from frontend.errors import RequestError

__all__ = ["listed", "report"]

_MS_DIGITS = 3


def listed(answers: Iterable[tuple[int, RequestInfos]]) -> RequestList:
    """All sequences of the answers, which are (rank, answer), for administrators."""
    answers = list(answers)
    data = [_sequence(rank, info, True) for rank, answer in answers for info in answer.requests]
    return RequestList(total=sum(answer.total for _, answer in answers), data=data)


def report(name: str, answers: Iterable[tuple[int, RequestInfos]], tenant: str | None) -> RequestReport:
    """The request `name` for its client, who has the key of `tenant`; None: for administrators.

    Raises RequestError (404) without one that this client may see.
    """
    found = [
        _sequence(rank, info, tenant is None)
        for rank, answer in answers
        for info in answer.requests
        if tenant is None or info.tenant == tenant
    ]
    if not found:
        raise RequestError(
            f"no request {name!r:.100} is known: running ones are, and some thousand that ended last",
            param="id",
            status=404,
        )
    return RequestReport(id=name, sequences=found)


def _sequence(rank: int, info: RequestInfo, is_admin: bool) -> SequenceReport:
    return SequenceReport(
        id=info.name,
        index=info.sequence,
        status=_STATUS[info.status],
        finish_reason=FinishReason(info.finish_reason).name.lower() if info.finish_reason else None,
        data_parallel_rank=rank,
        queue_ms=_ms(info.queue_s),
        prefill_ms=_ms(info.prefill_s),
        decode_ms=_ms(info.decode_s),
        prompt_tokens=info.prompt_tokens,
        cached_tokens=info.cached_tokens,
        first_missed_block=_miss(info, is_admin),
        generated_tokens=info.generated_tokens,
        accepted_draft_tokens=info.accepted_drafts,
        preemptions=info.preemptions,
        replays=info.replays,
    )


_STATUS: dict[RequestStatus, Literal["waiting", "prefilling", "decoding", "finished"]] = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.PREFILLING: "prefilling",
    RequestStatus.DECODING: "decoding",
    RequestStatus.FINISHED: "finished",
}


def _miss(info: RequestInfo, is_admin: bool) -> CacheMiss | None:
    reason: Literal["never_cached", "evicted", "other_salt", "cache_off"]
    match info.miss:
        case Miss.NONE:
            return None
        case Miss.EVICTED:
            reason = "evicted"
        case Miss.OFF:
            reason = "cache_off"
        case Miss.OTHER_SALT if is_admin:  # a client could test what others have sent
            reason = "other_salt"
        case _:
            reason = "never_cached"
    block = max(info.missed_block, 0)
    return CacheMiss(block=block, position=block * info.block_size, reason=reason)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, _MS_DIGITS)
