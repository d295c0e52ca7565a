"""One generated sequence, from the arrival of its request to its end."""

from enum import Enum, auto

from atom.shared.messages.engine import AddRequest, FinishReason, Sampling
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.requests.token_ids import TokenIds

NO_ROW = -1
NEVER_LATE = (0, -1)
"""`Request.late` of one that was in time."""


class State(Enum):
    """Only PREFILLING, DECODING and DRAINING have a row and blocks."""

    WAITING = auto()
    """In the queue: new or preempted. Results of a preempted request may still be in flight."""
    HELD = auto()
    """Was late for a step, or waits for a KV tier or a lost grammar: returns to the queue later."""
    PREFILLING = auto()
    """Has tokens to compute besides the one that it sampled last."""
    DECODING = auto()
    """In the decode batch: computes its last token, and drafts, in every step."""
    DRAINING = auto()
    """Its last step is in flight; its finish reason comes with the result."""
    ENDED = auto()
    """Nothing more is sent; row and blocks are freed when no step in flight uses them."""


class SharedSettings:
    """What all sequences of one `AddRequest` share."""

    __slots__ = (
        "eos_ids",
        "frontend",
        "grammar",
        "has_prompt_logprobs",
        "max_tokens",
        "name",
        "needs_output_ids",
        "needs_prompt_ids",
        "prediction_ids",
        "priority",
        "replays",
        "resume_key",
        "sampling_bytes",
        "stop_ids",
        "stores_prompt",
        "tenant",
    )

    def __init__(self, message: AddRequest, frontend: bytes, sampling_bytes: int):
        processors = message.sampling.logits_processors
        self.frontend = frontend
        self.name = message.name
        self.tenant = message.tenant
        self.has_prompt_logprobs = message.prompt_logprobs >= 0
        self.replays = message.replays
        self.resume_key = "" if message.resumable is None else message.resumable.key
        """That of its stream; empty if it cannot be resumed."""
        self.prediction_ids = message.prediction_ids
        self.max_tokens = message.max_tokens
        self.priority = message.priority
        self.eos_ids = frozenset(message.eos_token_ids)
        self.stop_ids = self.eos_ids.union(message.stop_token_ids)
        self.stores_prompt = message.stores_prompt
        self.sampling_bytes = sampling_bytes
        """Bytes of the sampling parameters and of the grammar's use, in a message."""
        self.grammar = None if message.grammar is None else message.grammar.row
        self.needs_prompt_ids = processors is not None and processors.needs_prompt_ids
        self.needs_output_ids = processors is not None and processors.needs_output_ids
        self.needs_output_ids |= self.grammar is not None


class Request:
    """A sequence's tokens, limits, blocks and scheduling state."""

    __slots__ = (
        "__weakref__",
        "accepted_drafts",
        "admitted_at",
        "arrival",
        "arrived_at",
        "blocks",
        "cached_tokens",
        "covered",
        "decode_offset",
        "discarded_until",
        "drafts_in_flight",
        "first_token_at",
        "frontend",
        "is_cacheable",
        "last_decode_step",
        "last_step",
        "late",
        "max_length",
        "num_computed_tokens",
        "output_ids",
        "preemptions",
        "priority",
        "prompt_length",
        "prompt_logprobs",
        "request_id",
        "row",
        "sampling",
        "settings",
        "state",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: int,
        settings: SharedSettings,
        sampling: Sampling,
        prompt_logprobs: int,
        blocks: RequestBlocks,
    ):
        self.request_id = request_id
        self.settings = settings
        self.frontend = settings.frontend
        self.priority = settings.priority
        self.stop_ids = settings.stop_ids
        self.sampling = sampling
        self.token_ids: TokenIds = blocks.tokens
        self.output_ids = self.token_ids.output
        """Generated tokens whose ids are known."""
        self.prompt_length = self.token_ids.prompt_length
        self.max_length = self.prompt_length + settings.max_tokens
        """Tokens of the prompt and the most of the output."""
        self.prompt_logprobs = prompt_logprobs
        """As in the message, until the last chunk of the prompt is scheduled; -1 from then on."""
        self.arrival = 0
        self.arrived_at = self.first_token_at = 0.0
        self.admitted_at = 0.0
        """Time of the first admission."""
        self.preemptions = self.accepted_drafts = 0
        self.state = State.WAITING
        self.row = NO_ROW
        self.blocks = blocks
        self.num_computed_tokens = 0
        """Tokens computed or in flight; with drafts in flight the most that these may be.

        Not kept up to date in a `DecodeBatch`, which counts its own steps instead.
        """
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission; None before it."""
        self.last_step = 0
        """Once it stops running: the last step that uses its row and blocks."""
        self.discarded_until = 0
        """Tokens sampled in steps up to this one are dropped."""
        self.late = NEVER_LATE
        """(times that it was late for a step since its last token, generated tokens at the last time)."""
        self.is_cacheable = True
        """False where its blocks hold values of a failed step."""
        self.decode_offset = self.last_decode_step = 0
        self.drafts_in_flight = 0
        """Drafts among `computed` that may be rejected."""
        self.covered = 0
        """Tokens for which a request that decodes with drafts has blocks."""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and generated tokens whose ids have arrived."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """How many generated tokens have known ids."""
        return len(self.output_ids)

    def stop_reason(self, token_id: int) -> FinishReason:
        """The reason to end with an id of `stop_ids`."""
        return FinishReason.EOS if token_id in self.settings.eos_ids else FinishReason.STOP_TOKEN
