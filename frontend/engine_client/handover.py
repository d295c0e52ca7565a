"""Prompts on some engines, generation on the others (--prefill-engines).

    request ──stores_prompt, max_tokens 1──▶ engine 0 … n - 1     computes the prompt, stores its blocks, or
                     ◀──first token, end──                        keeps them for the next engine (a lease)
            ──prompt and first token──────▶ engine n …            loads or reads the blocks, generates

The second message is that of a sequence whose engine has ended (`RunningSequence.resumed`), and so its output
is the same. An engine that finds no blocks computes the prompt. While all engines of one kind are gone, the
others do both.
"""

from collections.abc import Mapping

import msgspec

from atom.shared.messages.engine import ID_BYTES, AddRequest, Finished, FinishReason, TokenDeltas
from frontend.engine_client.dp_router import RoutedPrompt
from frontend.engine_client.sequence import RunningSequence

__all__ = ["Handovers", "routed_prompt"]


def routed_prompt(request: AddRequest) -> RoutedPrompt:
    """What the router reads of a request. A session has an engine for prompts, and one that generates."""
    num_left = request.max_tokens + request.num_prompt_ids - len(request.prompt_ids) // ID_BYTES
    session = request.session and request.session ^ request.stores_prompt
    return RoutedPrompt(request.prompt_ids, num_left, len(request.request_ids), request.cache_salt, session)


class Handovers:
    """Says which engines may run a request, and which sequences go on in another engine."""

    def __init__(self, num_prefill: int, block_tokens: int, min_tokens: int = 0):
        """The ranks below `num_prefill` compute prompts of `min_tokens` or more; 0: every engine does all."""
        self._num_prefill = num_prefill
        self._least = max(block_tokens + 1, min_tokens)

    def place(self, request: AddRequest, ready: list[int]) -> tuple[AddRequest, list[int]]:
        """The request as it is to be sent, and those of the ranks `ready` that may get it."""
        prefill = [rank for rank in ready if rank < self._num_prefill]
        others = [rank for rank in ready if rank >= self._num_prefill]
        if not (prefill and others):
            return request, ready
        if not self._is_for_two(request):
            return request, others
        return msgspec.structs.replace(request, max_tokens=1, stores_prompt=True), prefill

    def take(
        self, deltas: TokenDeltas, sequences: Mapping[int, RunningSequence]
    ) -> tuple[list[RunningSequence], TokenDeltas]:
        """The sequences whose prompt is computed and stored, and the deltas without their ends."""
        if not (self._num_prefill and deltas.finished):
            return [], deltas

        def goes_on(end: Finished) -> bool:
            sequence = sequences.get(end.request_id)
            return sequence is not None and sequence.is_prefill and end.reason is FinishReason.MAX_TOKENS

        found = []
        for end in filter(goes_on, deltas.finished):
            sequences[end.request_id].leased = end.leased
            found.append(sequences[end.request_id])
        if not found:
            return [], deltas
        rest = [end for end in deltas.finished if not goes_on(end)]
        return found, msgspec.structs.replace(deltas, finished=rest)

    def _is_for_two(self, request: AddRequest) -> bool:
        """Whether a request has enough blocks to hand over, and more than a first token to generate.

        An engine that gets a request with blocks has one step with the rest of its prompt, as it has with a
        whole short one, which then waits neither for other prompts nor for copies. Log probabilities of a
        prompt need all of it computed. A stream that can be resumed is kept by the engine that runs it.
        """
        return (
            len(request.prompt_ids) // ID_BYTES == request.num_prompt_ids >= self._least
            and request.max_tokens > 1
            and request.prompt_logprobs < 0
            and request.resumable is None
        )
