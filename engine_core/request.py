"""One generation, from its arrival to its end."""

from array import array
from enum import Enum, auto

from atom.messages.engine import AddRequest, FinishReason, Sampling, unpack_ids
from engine_core.kv_cache_manager import RequestBlocks

NO_ROW = -1


class State(Enum):
    """Where a request stands. Only the three in the middle own a row and blocks."""

    WAITING = auto()
    """In the queue: new, or preempted (its last results may still be under way)."""
    PREFILLING = auto()
    """Has known tokens to compute besides the last one drawn."""
    DECODING = auto()
    """In the decode cohort: computes one token in every step."""
    DRAINING = auto()
    """Its last step is handed out; the result decides how it ended."""
    ENDED = auto()
    """Nothing more is sent; row and blocks come back when no step touches them."""


class Request:
    """A request's tokens, limits and place in the schedule."""

    __slots__ = (
        "admitted_at",
        "arrival",
        "arrived_at",
        "blocks",
        "cached_tokens",
        "computed",
        "decode_offset",
        "eos_ids",
        "frontend",
        "last_decode_step",
        "last_step",
        "max_tokens",
        "priority",
        "prompt_length",
        "prompt_logprobs",
        "request_id",
        "row",
        "sampling",
        "state",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, message: AddRequest, frontend: bytes, blocks: RequestBlocks):
        """Raises ValueError for prompt bytes that are no token ids."""
        self.request_id = message.request_id
        self.frontend = frontend
        self.token_ids: array[int] = unpack_ids(message.prompt_ids)
        """All known tokens: the prompt, then what was generated."""
        self.prompt_length = len(self.token_ids)
        self.max_tokens = message.max_tokens
        self.sampling: Sampling = message.sampling
        self.prompt_logprobs = message.prompt_logprobs
        """As in the message, until its prompt is handed out whole; -1 from then on."""
        self.priority = message.priority
        self.eos_ids = frozenset(message.eos_token_ids)
        self.stop_ids = self.eos_ids.union(message.stop_token_ids)
        """Every id that ends the request."""
        self.arrival = 0
        """Place in the order of arrival."""
        self.arrived_at = 0.0
        self.admitted_at = 0.0
        """When it was admitted first."""
        self.state = State.WAITING
        self.row = NO_ROW
        self.blocks = blocks
        self.computed = 0
        """Tokens handed out for computing; kept by the cohort while `DECODING`."""
        self.cached_tokens: int | None = None
        """Prompt tokens hit in the prefix cache at first admission; None before it."""
        self.last_step = 0
        """Once it stops running: the last step that may touch it."""
        self.decode_offset = 0
        self.last_decode_step = 0

    @property
    def num_generated(self) -> int:
        """Generated tokens whose ids are known."""
        return len(self.token_ids) - self.prompt_length

    def stop_reason(self, token_id: int) -> FinishReason:
        """Which of its lists holds an id of `stop_ids`."""
        return FinishReason.EOS if token_id in self.eos_ids else FinishReason.STOP_TOKEN
