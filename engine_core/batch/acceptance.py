"""The result of a step with drafts: several tokens of a request, of which one may be its last."""

from array import array
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from atom.shared.messages.engine import Finished, FinishReason
from engine_core.batch.draft_batch import DraftBatch
from engine_core.batch.sampled_tokens import SampledTokens
from engine_core.requests.request import Request, State
from engine_core.stats import Counters
from engine_core.step import Step


@dataclass(slots=True)
class Acceptance:
    """What a result with drafts changes."""

    sampled: SampledTokens
    """The tokens that were appended to their requests."""
    ends: list[tuple[Request, Finished]]
    """The requests that these tokens end."""
    draining: list[Request]
    """Requests of the decode batch whose last tokens are certainly in flight."""


def accept(step: Step, sampled: SampledTokens, batch: DraftBatch) -> Acceptance:
    """Append the tokens to their requests, each up to its end, and correct the computed tokens."""
    requests = sampled.requests
    counts = sampled.counts or [1] * len(requests)
    ids = sampled.token_ids
    num_decodes = len(requests) - _num_last(requests, step.prefilled)
    may_end = {*range(num_decodes, len(requests))}
    may_end.update(batch.correct(requests[:num_decodes], counts[:num_decodes], step.num_drafts))
    starts = [0, *accumulate(counts)]
    if step.stop_ids is None:
        may_end.update(range(len(requests)))
    elif not step.stop_ids.isdisjoint(ids):
        stops = [place for place, token_id in enumerate(ids) if token_id in step.stop_ids]
        may_end.update(bisect_right(starts, place) - 1 for place in stops)
    kept = list(counts)
    ends = []
    draining = []
    for index in sorted(may_end):
        request = requests[index]
        start = starts[index]
        kept[index], end = _up_to_end(request, ids[start : start + counts[index]])
        if end is not None:
            ends.append((request, end))
        elif request.state is State.DECODING and batch.is_ending(request):
            draining.append(request)
    start = 0
    for request, count, kept_count in zip(requests, counts, kept, strict=True):
        request.output_ids.extend(ids[start : start + kept_count])
        request.accepted_drafts += kept_count - 1
        start += count
    if sum(kept) < start:
        sampled = sampled.shorten(kept)
    return Acceptance(sampled, ends, draining)


def _num_last(requests: list[Request], prefilled: list[Request]) -> int:
    """How many of `requests` have just been prefilled; those are at its end."""
    ids = set(map(id, prefilled))
    start = max(len(requests) - len(prefilled), 0)
    return sum(id(request) in ids for request in requests[start:])


def _up_to_end(request: Request, ids: "array[int]") -> tuple[int, Finished | None]:
    """How many of its new ids a request gets, and its end; None if it goes on."""
    left = request.max_length - request.num_tokens
    for index, token_id in enumerate(ids[:left]):
        if token_id in request.stop_ids:
            return index + 1, Finished(request.request_id, request.stop_reason(token_id), token_id)
    if len(ids) < left:
        return len(ids), None
    return left, Finished(request.request_id, FinishReason.MAX_TOKENS)


def count_drafts(sampled: SampledTokens, counters: Counters) -> None:
    """Count the drafts that a step verified."""
    num_drafts = sum(map(bool, sampled.num_proposed))
    if num_drafts:
        counters.num_drafts += num_drafts
        counters.num_draft_tokens += sum(sampled.num_proposed)
        counters.num_accepted.update(Counter(count - 1 for count in sampled.counts if count > 1))
