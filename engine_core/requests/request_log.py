"""What became of each sequence: of the running ones, and of the last ones that have ended."""

import logging
from collections import deque
from collections.abc import Iterable

from atom.shared.messages.admin import Miss, RequestInfo, RequestStatus
from atom.shared.messages.engine import FinishReason
from atom.shared.utils.logger import get_logger
from engine_core.requests.request import Request, State

_MAX_FINISHED = 4096
_STATUS = {
    State.WAITING: RequestStatus.WAITING,
    State.HELD: RequestStatus.WAITING,
    State.PREFILLING: RequestStatus.PREFILLING,
    State.DECODING: RequestStatus.DECODING,
    State.DRAINING: RequestStatus.DECODING,
    State.ENDED: RequestStatus.FINISHED,
}


class RequestLog:
    """The last sequences that have ended, by the name of their request."""

    def __init__(self, block_size: int, size: int = _MAX_FINISHED):
        self._block_size = block_size
        self._size = size
        self._order: deque[RequestInfo] = deque()
        self._by_name: dict[str, deque[RequestInfo]] = {}

    def add(self, request: Request, reason: FinishReason, now: float) -> None:
        """`request` has ended; with log level debug there is a line about it."""
        info = describe(request, now, self._block_size, reason)
        self._order.append(info)
        self._by_name.setdefault(info.name, deque()).append(info)
        if len(self._order) > self._size:
            name = self._order.popleft().name
            self._by_name[name].popleft()
            if not self._by_name[name]:
                del self._by_name[name]
        logger = get_logger()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", _line(info))

    def named(self, name: str) -> Iterable[RequestInfo]:
        """The sequences of the request `name` that have ended, the first one first."""
        return self._by_name.get(name, ())


def describe(
    request: Request, now: float, block_size: int, reason: FinishReason | None = None
) -> RequestInfo:
    """The state of a sequence at the time `now`; `reason` is that of its end."""
    settings = request.settings
    blocks = request.blocks
    queued_until = request.admitted_at or now
    prefilled_at = request.first_token_at or now
    miss = Miss.NONE if blocks.miss is None else blocks.miss
    return RequestInfo(
        name=settings.name,
        tenant=settings.tenant,
        sequence=request.sampling.sequence,
        status=_STATUS[request.state] if reason is None else RequestStatus.FINISHED,
        finish_reason=0 if reason is None else int(reason),
        queue_s=queued_until - request.arrived_at,
        prefill_s=prefilled_at - queued_until,
        decode_s=now - prefilled_at,
        prompt_tokens=request.prompt_length,
        generated_tokens=request.num_generated,
        cached_tokens=request.cached_tokens or 0,
        miss=Miss.OFF if settings.has_prompt_logprobs else miss,
        missed_block=blocks.missed_block,
        block_size=block_size,
        preemptions=request.preemptions,
        accepted_drafts=request.accepted_drafts,
        replays=settings.replays,
    )


def _line(info: RequestInfo) -> str:
    return (
        f"request {info.name} ended by {FinishReason(info.finish_reason).name}: {info.prompt_tokens} prompt "
        f"tokens ({info.cached_tokens} cached), {info.generated_tokens} generated; "
        f"queue {info.queue_s:.3f} s, prefill {info.prefill_s:.3f} s, decode {info.decode_s:.3f} s"
    )
