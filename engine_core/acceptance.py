"""The result of a step with drafts: several tokens of a request, of which one may be its last."""

from array import array
from collections import Counter
from dataclasses import dataclass

from atom.messages.engine import Finished, FinishReason
from engine_core.draft_batch import DraftBatch
from engine_core.request import Request, State
from engine_core.sampled_tokens import SampledTokens
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
    prefilled = set(map(id, step.prefilled))
    has_stop = step.stop_ids is None or not step.stop_ids.isdisjoint(sampled.token_ids)
    start, kept = 0, list(sampled.counts)
    result = Acceptance(sampled, [], [])
    for index, (request, count) in enumerate(zip(sampled.requests, sampled.counts, strict=True)):
        ids = sampled.token_ids[start : start + count]
        start += count
        if request.state is not State.WAITING and id(request) not in prefilled:
            batch.correct(request, count)
        if has_stop or len(request.token_ids) + count >= request.max_length:
            ids, end = _up_to_end(request, ids)
            if end is not None:
                result.ends.append((request, end))
                kept[index] = len(ids)
        request.output_ids.extend(ids)
        if request.state is State.DECODING and batch.is_ending(request):
            result.draining.append(request)
    if sum(kept) < start:
        result.sampled = sampled.shorten(kept)
    return result


def _up_to_end(request: Request, ids: "array[int]") -> "tuple[array[int], Finished | None]":
    """The new ids of a request up to the first that ends it, and its end; None if it goes on."""
    left = request.max_length - len(request.token_ids)
    for index, token_id in enumerate(ids[:left]):
        if token_id in request.stop_ids:
            return ids[: index + 1], Finished(request.request_id, request.stop_reason(token_id), token_id)
    if len(ids) < left:
        return ids, None
    return ids[:left], Finished(request.request_id, FinishReason.MAX_TOKENS)


def count_drafts(sampled: SampledTokens, counters: Counters) -> None:
    """Count the drafts that a step verified."""
    num_drafts = sum(map(bool, sampled.num_proposed))
    if num_drafts:
        counters.num_drafts += num_drafts
        counters.num_draft_tokens += sum(sampled.num_proposed)
        counters.num_accepted.update(Counter(count - 1 for count in sampled.counts if count > 1))
