"""Messages between a frontend and an engine core.

The core binds a ROUTER, each frontend connects a DEALER, and responses use the same socket. Token
ids are packed little-endian int32 (`pack_ids`), never lists of Python integers: a long prompt is
one memory copy on either side.
"""

from array import array
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from atom.shared.messages.admin import Answer, Question, SetLogLevel
from atom.shared.messages.grammar import GetGrammar, Grammar, GrammarBytes
from atom.shared.messages.images import PromptImage
from atom.shared.messages.kv_peers import LeasedBlocks
from atom.shared.messages.profile import Profile, ProfileResult
from atom.shared.messages.resume import Claim, Claimed, Resumable, TakeStreams

ID_BYTES = 4
"""Size of a packed token id."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> "array[int]":
    """The inverse of `pack_ids`; raises ValueError when the length is not a multiple of four."""
    ids: array[int] = array("i")
    ids.frombytes(data)
    return ids


class FinishReason(IntEnum):
    """Why a request ended. `EOS` and `STOP_TOKEN` differ in which list held the id."""

    EOS = 1
    STOP_TOKEN = 2
    MAX_TOKENS = 3
    ABORTED = 4
    ERROR = 5
    STOP_STRING = 6  # seen by the frontend, on text; a core never sends it
    TIMEOUT = 7  # the request's deadline, kept by the frontend; a core never sends it
    REFUSED = 8  # an error for which the request itself is the cause
    OVERLOADED = 9  # it has waited longer than --max-queue-time


class LogitsProcessors(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Changes to the logits of a row before it samples, in this order.

    allowed_ids, bad_words, min_tokens   the excluded ids get minus infinity
    bias                                 is added
    repetition, frequency, presence      penalties, for the ids that occurred
    """

    allowed_ids: bytes = b""
    """Packed int32; only these may be sampled. Empty allows all."""
    bad_words: list[list[int]] = []
    """The last id of a word may not be sampled where the ids before it were generated last."""
    min_tokens: int = 0
    """Before this many tokens are generated, none of `end_ids` may be sampled."""
    end_ids: list[int] = []
    bias_ids: bytes = b""
    """Packed int32; `bias_values` are added to their logits."""
    bias_values: list[float] = []
    repetition_penalty: float = 1.0
    """Positive logits of ids in the prompt or the output are divided by it, negative multiplied."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that an id was generated."""
    presence_penalty: float = 0.0
    """Subtracted once for each id that was generated."""

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the prompt's ids change the logits."""
        return self.repetition_penalty != 1.0

    @property
    def needs_output_ids(self) -> bool:
        """Whether the generated ids change the logits."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0) or any(len(word) > 1 for word in self.bad_words)


class Sampling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How the sequences of a request sample their tokens. Every field has a value."""

    temperature: float
    """0 is greedy."""
    top_k: int
    """0 is off."""
    top_p: float
    min_p: float
    seed: int
    """Unsigned 64 bit; chosen by the frontend when the client gave none."""
    sequence: int = 0
    """Index among the `n` sequences of one request, part of the random key; in an `AddRequest` that
    of its first sequence."""
    logits_processors: LogitsProcessors | None = None
    """None when the request sets none of them."""
    logprobs: int = -1
    """Report each sampled token's log probability and this many of the most likely; -1 is off."""


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """The first message of a frontend; the core responds with `CoreReady` once it can generate."""

    frontend: int


class AddRequest(msgspec.Struct, tag=2, array_like=True, frozen=True, gc=False):
    """One prompt, and the sequences to generate from it.

    Sequence i has the id `request_ids[i]` and the index `sampling.sequence` + i. Ids are unique among
    all unfinished sequences of a core.
    """

    request_ids: list[int]
    prompt_ids: bytes
    max_tokens: int
    """At least 1; prompt and max_tokens together fit max_model_len (the frontend checks)."""
    sampling: Sampling
    eos_token_ids: list[int] = []
    """Ids that end the request with `EOS`; empty when end-of-sequence is ignored."""
    stop_token_ids: list[int] = []
    priority: int = 0
    """Smaller runs first, under the priority policy."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    prompt_logprobs: int = -1
    """Like `Sampling.logprobs`, for the prompt's own tokens from the second on; -1 is off."""
    prompt_length: int = 0
    """Number of leading `prompt_ids` that are the prompt; 0: all of them. The ids after them were generated
    by an earlier run of the request and count as its output everywhere: in `max_tokens`, `min_tokens`,
    penalties and the positions of random numbers. No FirstToken is sent then."""
    prediction_ids: bytes = b""
    """Packed int32: the output that the client expects, from which draft tokens may be taken."""
    name: str = ""
    """The id that the client knows, for queries about the request."""
    tenant: str = ""
    """Identifies the API key, so that clients with other keys learn nothing about the request."""
    grammar: Grammar | None = None
    """What the output must be; None: any text."""
    replays: int = 0
    """How often the request has been sent to an engine that ended."""
    resumable: Resumable | None = None
    """What another frontend needs to go on with its stream; None: it ends with its frontend."""
    session: int = 0
    """Hash of the session that the client names, for the choice of an engine; 0: none."""
    stores_prompt: bool = False
    """Its blocks are stored while it runs, and its end by `max_tokens` is sent when all are stored: then
    another engine that shares the KV tier goes on with it."""
    images: list[PromptImage] = []
    """Those of the prompt, by their start."""
    leased: LeasedBlocks | None = None
    """Blocks of the prompt that another engine keeps for this request."""

    @property
    def num_prompt_ids(self) -> int:
        """Number of ids of the prompt, without those of an earlier run."""
        return self.prompt_length or len(self.prompt_ids) // ID_BYTES

    @property
    def pixel_bytes(self) -> int:
        """Bytes of all its images."""
        return sum(len(image.pixels) for image in self.images)


MAX_SEQUENCES = 1024
"""Most sequences of one `AddRequest`."""
MAX_ADD_REQUEST_BYTES = 32 * 1024 * 1024
"""A frontend refuses a request whose `AddRequest` has more bytes, so that it fits a frame."""


class Abort(msgspec.Struct, tag=3, array_like=True, frozen=True, gc=False):
    """End these sequences; ids that have ended already are ignored. There is no response."""

    request_ids: list[int]
    reason: FinishReason = FinishReason.ABORTED
    """The finish reason that `RequestInfos` give for them."""


class CoreReady(msgspec.Struct, tag=10, array_like=True, frozen=True, gc=False):
    """The core and all its workers can generate."""

    max_model_len: int
    kv_tokens: int
    """Tokens that the KV cache can hold."""
    weight_bytes: list[int] = []
    """Bytes of the weights on each worker rank."""


class LogprobTable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log probabilities of N tokens given what precedes each, of the model's own logits.

    Little-endian columns. Entry [i, 0] is token i itself; the rest of row i are the top ids at its
    position, the most likely first. There may be more of them than a request wants.
    """

    width: int
    ids: bytes
    """int32 [N, width]"""
    values: bytes
    """float32 [N, width]"""
    ranks: bytes
    """int32 [N]: 1 for the most likely token."""


class SampledLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log probabilities of the sampled tokens whose requests want them."""

    indices: list[int]
    """Row i of the table belongs to sampled token `indices[i]` of the message."""
    table: LogprobTable


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log probabilities of a chunk of one prompt. After a preemption, chunks may repeat and overlap."""

    owner: int
    """From a worker the row, from a core the request id."""
    start: int
    """Position of the chunk's first token in the prompt; at least 1."""
    table: LogprobTable


class Finished(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The end of one sequence; comes with its last token, or alone for an error."""

    request_id: int
    reason: FinishReason
    stop_token_id: int = -1
    """For `EOS` and `STOP_TOKEN`: the id that ended it, which is the last token sent."""
    message: str = ""
    """For `ERROR` and `REFUSED`: what went wrong."""
    leased: LeasedBlocks | None = None
    """With `AddRequest.stores_prompt`: what the engine keeps of the prompt for the one that goes on."""


class FirstToken(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Sent once, with a sequence's first token."""

    request_id: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache at the first admission."""
    queued_s: float = 0.0
    """Seconds between the request's arrival at the core and its first admission."""
    prefill_s: float = 0.0
    """Seconds between its first admission and this token."""


class TokenDeltas(msgspec.Struct, tag=11, array_like=True, frozen=True, gc=False):
    """The new tokens of one step for one frontend, as columns.

    `token_ids` is packed int32: counts[i] ids of each request_ids[i], or one each when `counts` is
    empty (the usual case).
    """

    step: int
    request_ids: list[int]
    token_ids: bytes
    counts: list[int] = []
    first: list[FirstToken] = []
    finished: list[Finished] = []
    logprobs: SampledLogprobs | None = None
    """`indices` point into `token_ids`."""
    prompt_logprobs: list[PromptLogprobs] = []
    num_proposed: list[int] = []
    """Number of draft tokens that the step verified for each of `request_ids`; empty means none. As many of
    them were accepted as the request has ids after its first."""


class KVTierStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One tier of memory to which blocks of the KV cache are copied: counters since start, and its use."""

    medium: str
    """As KV events name it: CPU for host memory."""
    blocks_total: int
    blocks_used: int
    """Blocks that it has."""
    hits: int
    """Prompt tokens that were found in the prefix cache because they had been copied back from this tier."""
    stored: int
    """Blocks copied to it."""
    loaded: int
    """Blocks copied back to the device."""
    failed: int
    """Copies that failed."""


class HeapUse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What malloc has of a process, in bytes; zeros where the C library does not say."""

    allocated: int = 0
    free: int = 0
    """Freed, and kept for what is allocated next."""


class CoreStats(msgspec.Struct, tag=12, array_like=True, frozen=True, gc=False):
    """Counters since start and current gauges; the response to `GetStats`."""

    steps: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    preemptions: int
    prefill_preemptions: int
    """Preemptions that hit a request still in prefill."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Prompt tokens found in the prefix cache."""
    chunked_prefills: int
    """Prompt chunks that did not finish their prompt."""
    overlapped_steps: int
    """Steps sent to the workers before the previous step's result was received."""
    prompt_tokens: int
    generated_tokens: int
    num_drafts: int = 0
    """Times that draft tokens of a sequence were verified."""
    num_draft_tokens: int = 0
    """Draft tokens that were verified."""
    num_accepted_tokens_per_pos: list[int] = []
    """Accepted draft tokens by place in their draft; as many as `num_speculative_tokens`."""
    prefill_tokens: int = 0
    """Tokens computed by prefills, those that were computed again after a preemption included."""
    kv_blocks_cached: int = 0
    """KV blocks that no request uses, and that the prefix cache has."""
    expert_imbalance: list[float] = []
    """For each MoE layer, tokens of the fullest rank over the mean of the ranks, in the last window. Empty
    without --enable-eplb, before the end of the first window, and on all engines that share
    experts but one."""
    experts_moved: int = 0
    """Experts copied to another slot, on all ranks."""
    orphans: int = 0
    """Unfinished sequences whose frontend is gone, and that wait for a client to resume them."""
    orphans_expired: int = 0
    """Sequences that were ended since no frontend had claimed them in time."""
    kv_tiers: list[KVTierStats] = []
    """In the order in which they are read."""
    worker_heaps: list[HeapUse] = []
    """By the rank of the worker in its engine."""


class GetStats(msgspec.Struct, tag=4, array_like=True, frozen=True, gc=False):
    """Request `CoreStats`."""


class CoreDead(msgspec.Struct, tag=13, array_like=True, frozen=True, gc=False):
    """The core's last message: it ends, and sends no more tokens."""

    reason: str


class CoreStalled(msgspec.Struct, tag=14, array_like=True, frozen=True, gc=False):
    """A worker does not respond: the engine cannot generate until the next `CoreReady`, or `CoreDead`."""

    reason: str


ToCore = (
    Hello
    | AddRequest
    | Abort
    | GetStats
    | Profile
    | Question
    | SetLogLevel
    | GrammarBytes
    | Claim
    | TakeStreams
)
FromCore = (
    CoreReady
    | CoreStalled
    | TokenDeltas
    | CoreStats
    | CoreDead
    | ProfileResult
    | Answer
    | GetGrammar
    | Claimed
)
