"""Messages between an engine core and its workers.

The core binds a ROUTER, each worker connects a DEALER whose identity is its rank in four
little-endian bytes. One encode per step: the same frame goes to every rank. Workers keep
the batch: a `ScheduledBatch` has only the changes, the rows that run, and the ids to compute. Its
size is bounded by the limits of a step, not by the length of prompts (`engine_core.batch.batch_bytes`).

Start-up:   worker -> Loaded, core -> AllocateKV, worker -> WorkerReady
Each step:  core -> ScheduledBatch, rank 0 -> BatchResult (any rank may send WorkerFailed)
Any time:   worker -> WorkerHeartbeat (from a second socket)
            core -> CopyBlocks, each worker -> BlocksCopied, with KV tiers
            core -> FindBlocks, each worker -> BlocksFound, with KV tiers that other engines share
            core -> ReleaseLease, EndLeases, worker -> LeasesReleased, where engines read one another's blocks
            core -> LoadImage, DropImage, before the step that needs or no longer needs an image
            core -> Profile, worker -> RankTrace (of a stop, steps later: when its file is written)
"""

import msgspec

from atom.shared.messages.admin import SetLogLevel
from atom.shared.messages.engine import HeapUse, PromptLogprobs, SampledLogprobs, Sampling
from atom.shared.messages.grammar import DropGrammar, GrammarLoaded, LoadGrammar, RowGrammar
from atom.shared.messages.images import DropImage, LoadImage, RowImage
from atom.shared.messages.kv_peers import EndLeases, LeasesReleased, ReleaseLease
from atom.shared.messages.kv_tiers import (
    BlocksCopied,
    BlocksFound,
    CopyBlocks,
    FindBlocks,
    StoredBlocks,
    TierSlots,
)
from atom.shared.messages.profile import Profile, RankTrace


class FullAttentionSpec(msgspec.Struct, tag="full", array_like=True, frozen=True, gc=False):
    """KV of layers that attend to the whole context: one slot for each token, until the request ends."""

    block_size: int
    bytes_per_block: int
    """On this rank, over all layers of the group."""


class SlidingWindowSpec(msgspec.Struct, tag="window", array_like=True, frozen=True, gc=False):
    """KV of layers that attend to the last `window` tokens; blocks that leave the window are freed."""

    block_size: int
    bytes_per_block: int
    window: int


class RecurrentStateSpec(msgspec.Struct, tag="state", array_like=True, frozen=True, gc=False):
    """State of recurrent layers: one slot for each request, however long it is.

    A group's blocks are its slots. A state summarizes a whole sequence and is overwritten in each step.
    Copies of it, in slots of their own, serve requests that continue from the same tokens.
    """

    bytes_per_slot: int
    """On this rank, over all layers of the group."""
    places: int = 1
    """States in a slot, of which the first is saved: with drafts there is one for each token of a step."""


MAX_LENGTH = (1 << 31) - 1

PagedSpec = FullAttentionSpec | SlidingWindowSpec
"""Groups whose blocks hold tokens."""
KVSpec = FullAttentionSpec | SlidingWindowSpec | RecurrentStateSpec


def stored_bytes(spec: KVSpec) -> int:
    """Bytes of what a KV tier keeps of a block, or of a slot: its first state."""
    if isinstance(spec, RecurrentStateSpec):
        return spec.bytes_per_slot // spec.places
    return spec.bytes_per_block


class NewRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Assigns a row of the persistent batch to a request, in place of an earlier one.

    The row samples a token in every step that computes its last known token.
    """

    row: int
    num_known: int
    """Tokens known so far: the prompt and, for a resumed request, what it had generated."""
    computed: int
    """How many of these, from the first on, have their KV in the blocks; less than `num_known`."""
    block_ids: list[list[int]]
    """One list for each KV group, in the order of the specs; for a recurrent state, its only slot."""
    sampling: Sampling
    prompt_length: int
    """How many of the known tokens are the prompt."""
    prompt_logprobs: int = -1
    """Report the log probabilities of prompt tokens that this row computes, and this many of the
    most likely at each position; -1 is off."""
    prompt_ids: bytes = b""
    """Packed int32, each id of the prompt once, if `LogitsProcessors.needs_prompt_ids`; else empty."""
    output_ids: bytes = b""
    """Packed int32: what a resumed request had generated, if `LogitsProcessors.needs_output_ids` or with a
    grammar."""
    max_length: int = MAX_LENGTH
    """Tokens of the prompt and the most of the output. No KV is written for positions from here on, and
    samples for them are dropped."""
    prediction_ids: bytes = b""
    """Packed int32: the output that the client expects, for the n-gram lookup; empty with other methods."""
    grammar: RowGrammar | None = None
    """What the output must be, with a grammar that this worker has loaded; None: any text."""
    request_id: int = 0
    """With a grammar the number of the request, which keeps it when it is resumed in another row; else 0."""
    is_private: bool = False
    """Whether the request has a cache salt: drafts of other requests do not come from its output."""
    images: list[RowImage] = []
    """The images of the prompt, by their start."""


class MoreBlocks(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks appended to a row's tables, one list for each KV group."""

    row: int
    block_ids: list[list[int]]


class StateCopy(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Copies a recurrent state from one slot of a group to another."""

    group: int
    source: int
    target: int


class ScheduledBatch(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """One step: `rows[i]` computes its next `counts[i]` tokens.

    `counts` empty means one each. Rows that are not listed keep their state. A row whose known
    tokens are all computed decodes: its input is the id that it sampled last, which never leaves
    the device.

    With drafts, a decoding row computes 1 + `num_drafts` tokens: its last id and the ids that the worker
    has proposed. It advances by one and by as many drafts as the model samples itself, which the result
    tells. The count of a decoding row is then 1 + `num_drafts`, and so is that of all rows where `counts`
    is empty.
    """

    step: int
    rows: list[int]
    counts: list[int] = []
    new_rows: list[NewRow] = []
    more_blocks: list[MoreBlocks] = []
    token_ids: bytes = b""
    """Packed int32: the ids that the rows with known tokens compute in this step, in batch order."""
    next_ids: bytes = b""
    """Packed int32, one for each row that wants prompt log probabilities and does not reach the
    prompt's end in this step: the id after its chunk. In batch order."""
    num_drafts: int = 0
    """Draft tokens of each decoding row: 0 or `num_speculative_tokens`."""
    state_saves: list[StateCopy] = []
    """Copies to make before the step, at the same time: all sources are read before a target is written."""
    state_restores: list[StateCopy] = []
    """Copies to make after `state_saves` and before the step."""


class AllocateKV(msgspec.Struct, tag=2, array_like=True, frozen=True, gc=False):
    """Make the KV tensors, `num_blocks[g]` blocks for group g, and warm up."""

    num_blocks: list[int]
    max_model_len: int
    """Length of the longest sequence that may be scheduled."""
    tiers: list[TierSlots] = []
    """Where blocks are kept after the KV cache has evicted them."""
    hash_seed: int = 0
    """That of the blocks' digests, unsigned 64 bit; servers that share a remote tier agree on it."""
    lease_address: str = ""
    """`Lease.address` of this engine's leases; empty: it grants none."""
    lease_secret: bytes = b""
    """With which it seals them."""


class Shutdown(msgspec.Struct, tag=3, array_like=True, frozen=True, gc=False):
    """Leave the loop and exit 0."""


class StepsDone(msgspec.Struct, tag=4, array_like=True, frozen=True, gc=False):
    """The engine has no step in flight, and none to send now; sent after steps of engines in lockstep."""


class WaveStart(msgspec.Struct, tag=5, array_like=True, frozen=True, gc=False):
    """Between the workers of engines in lockstep: one has a step, so all begin their wave number `wave`."""

    wave: int


class Loaded(msgspec.Struct, tag=10, array_like=True, frozen=True, gc=False):
    """Weights are on the device; this much memory may hold KV."""

    rank: int
    kv_specs: list[KVSpec]
    kv_bytes: int
    weight_bytes: int
    kv_room: int = -1
    """Bytes that the KV cache may take at most on this rank; -1: the device refuses what is too much."""
    image_tokens: int = 0
    """Tokens of images whose features this rank holds at a time; 0: it has no vision tower."""


class WorkerReady(msgspec.Struct, tag=11, array_like=True, frozen=True, gc=False):
    """The KV cache is allocated, and warm-up is done."""

    rank: int
    stored: list[StoredBlocks] = []
    """What the tiers that keep blocks between starts have."""


class RowFailure(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A row whose step failed on the worker, for example for lack of device memory."""

    row: int
    reason: str
    """One line, for the client."""
    is_refused: bool = False
    """Whether the request itself is the cause, and would fail again."""


class BatchResult(msgspec.Struct, tag=12, array_like=True, frozen=True, gc=False):
    """The result of one step.

    `token_ids` (packed int32) has the sampled ids of each sampling row, in batch order: one, or
    `counts[i]` after accepted drafts. A failed or late row has none.
    """

    step: int
    token_ids: bytes
    logprobs: SampledLogprobs | None = None
    """`indices` point into `token_ids`."""
    prompt_logprobs: list[PromptLogprobs] = []
    """Their `owner` is a row."""
    failed: list[RowFailure] = []
    """Rows of the step whose requests end with an error. Their KV of this step is not valid."""
    counts: bytes = b""
    """Packed int32: for each sampling row, except failed and late ones, how many of `token_ids` it sampled;
    empty means one each, as after a step without drafts."""
    num_proposed: bytes = b""
    """Packed int32: for each of the same rows, how many drafts the step verified, 0 to `num_drafts`;
    empty means none."""
    late: list[int] = []
    """Sampling rows whose grammar did not say in time which ids may come next. What they sampled in this
    step, and will sample until they are assigned again, is to be dropped; here they have no ids."""


class WorkerFailed(msgspec.Struct, tag=13, array_like=True, frozen=True, gc=False):
    """A rank cannot go on; `reason` is one line."""

    rank: int
    reason: str


class WorkerHeartbeat(msgspec.Struct, tag=14, array_like=True, frozen=True, gc=False):
    """Sent about every second from a thread of its own, so that it arrives while a step computes, too."""

    rank: int
    heap: HeapUse = HeapUse()


class ExpertLoad(msgspec.Struct, tag=17, array_like=True, frozen=True, gc=False):
    """How evenly the last window's tokens were spread over the ranks that share experts; from one of them."""

    imbalance: list[float]
    """For each MoE layer, tokens of the fullest rank over the mean of the ranks."""
    moved: int
    """Experts copied to another slot since the start, on all ranks."""


ToWorker = (
    ScheduledBatch
    | AllocateKV
    | Shutdown
    | StepsDone
    | Profile
    | SetLogLevel
    | LoadGrammar
    | DropGrammar
    | CopyBlocks
    | FindBlocks
    | ReleaseLease
    | EndLeases
    | LoadImage
    | DropImage
)
FromWorker = (
    Loaded
    | WorkerReady
    | BatchResult
    | WorkerFailed
    | WorkerHeartbeat
    | RankTrace
    | ExpertLoad
    | GrammarLoaded
    | BlocksCopied
    | BlocksFound
    | LeasesReleased
)
