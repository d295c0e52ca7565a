"""One sequence of a request, from its start to its end, over all engines that run it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from atom.shared.messages.codec import encode
from atom.shared.messages.engine import AddRequest, pack_ids
from atom.shared.messages.kv_peers import LeasedBlocks
from atom.shared.messages.resume import ClaimedRequest, ClaimedSequence, EndedSequence
from frontend.engine_client.dp_router import Charge
from frontend.engine_client.engine_connection import EngineConnection
from frontend.engine_client.streams import Stream
from frontend.metrics.metrics import Progress, RunningRequest
from frontend.text.output_processor import RequestState, SequenceOutput, end_of

__all__ = ["RunningSequence", "claimed_requests"]


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One sequence that an engine generates, or that waits for an engine."""

    id: int
    """Its id in messages, unique among the sequences of all frontends."""
    state: RequestState
    stream: Stream
    progress: Progress
    wanted: int | None
    """The rank that its client chose."""
    rank: int = 0
    """Rank of its engine, or of the last one."""
    engine: EngineConnection | None = None
    charge: Charge | None = None
    """What the router has charged to its engine's rank."""
    replays: int = 0
    """How often it was sent again."""
    tokens_at_death: int = 0
    """Tokens that it had when an engine last ended that it may have ended."""
    starting_ids: int = 0
    """Ids that it was sent again with; 0 once it has a new token."""
    passes_at: int = 0
    """Tokens with which it is past the place where it died, while it is tried; 0: it is not tried now."""
    cached_tokens: int = 0
    """Prompt tokens that its first engine had in its prefix cache."""
    is_prefill: bool = False
    """Whether its engine only computes its prompt and a first token."""
    leased: LeasedBlocks | None = None
    """What that engine keeps for the next one, until the sequence is sent there."""

    @classmethod
    def adopted(
        cls, claimed: ClaimedSequence, request: AddRequest, state: RequestState, stream: Stream
    ) -> "RunningSequence":
        """A sequence that has run before, for another frontend or connection."""
        now = time.monotonic()
        state.emitted.frombytes(claimed.output_ids)
        progress = Progress(now, request.num_prompt_ids, len(state.emitted))
        if progress.tokens:
            progress.first_token_at = progress.last_token_at = now
            stream.first_token_at = stream.first_token_at or now
        sequence = cls(claimed.request_id, state, stream, progress, None)
        sequence.cached_tokens = claimed.cached_tokens
        sequence.replays = request.replays
        return sequence

    @property
    def name(self) -> str:
        """The id of its request that the client knows."""
        return self.state.request.name

    @property
    def num_left(self) -> int:
        """The most tokens that it still gets."""
        return self.state.request.max_tokens - len(self.state.emitted)

    @property
    def is_complete(self) -> bool:
        """Whether it has all of its tokens, and only its end is missing: blocks were still being stored."""
        return self.num_left <= 0

    def running_request(self) -> RunningRequest:
        """Its figures for the status page."""
        progress = self.progress
        return RunningRequest(
            self.id,
            self.rank,
            progress.prompt_tokens,
            progress.tokens,
            progress.arrived_at,
            name=self.name,
            first_token_at=progress.first_token_at,
            last_token_at=progress.last_token_at,
            queue_s=progress.queue_s,
        )

    def resumed(self) -> AddRequest:
        """The request that lets it go on after the ids that it has emitted."""
        request = self.state.request
        sampling = request.sampling
        index = request.request_ids.index(self.id)
        return msgspec.structs.replace(
            request,
            request_ids=[self.id],
            prompt_ids=request.prompt_ids + pack_ids(self.state.emitted),
            prompt_length=request.num_prompt_ids,
            sampling=msgspec.structs.replace(sampling, sequence=sampling.sequence + index),
            # They come with the first token.
            prompt_logprobs=-1 if self.state.emitted else request.prompt_logprobs,
            replays=self.replays,
            leased=self.leased,
            resumable=request.resumable
            and msgspec.structs.replace(request.resumable, ended=list(self.stream.sequences_ended)),
        )

    def ended(self, update: SequenceOutput) -> EndedSequence:
        """Its ids and its end, which `update` has; it is without text."""
        end = end_of(update)
        assert end is not None
        ids = self.state.emitted.tobytes()
        return EndedSequence(self.id, ids, int(end.reason), end.stop_token_id, self.cached_tokens)

    def output(self) -> SequenceOutput:
        """All ids that it has emitted, of a sequence without text."""
        ids = self.state.emitted[:]
        return SequenceOutput(self.id, ids, cached_tokens=self.cached_tokens)


def claimed_requests(sequences: Iterable[RunningSequence]) -> list[ClaimedRequest]:
    """All that another frontend or server needs to go on with sequences: each request once."""
    found: dict[int, ClaimedRequest] = {}
    for sequence in sequences:
        request = sequence.state.request
        part = found.get(id(request)) or found.setdefault(id(request), ClaimedRequest(encode(request), []))
        own = ClaimedSequence(sequence.id, sequence.state.emitted.tobytes(), sequence.cached_tokens)
        part.sequences.append(own)
    return list(found.values())
