"""A checked and tokenized request, and what its response contains."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from atom.shared.messages.engine import AddRequest
from frontend.api.generation.logprobs import TokenFormatter
from frontend.api.generation.prompts import Prompt
from frontend.api.generation.renderer import Renderer
from frontend.api.generation.usage import UsageCounter
from frontend.metrics.tracing import TraceContext
from frontend.text.output_processor import SequenceOutput, TextOptions

__all__ = ["TOKEN_BYTES", "GenerateRequest", "ResponseOptions"]

TOKEN_BYTES = 8
"""About what the id of a token takes in a response."""


@dataclass(frozen=True)
class ResponseOptions:
    """What a response contains besides the generated text."""

    tokens: TokenFormatter
    logprobs: int | None = None
    """Number of top tokens per generated token; None: no log probabilities."""
    prompt_logprobs: int | None = None
    echo: bool = False
    token_ids: bool = False
    prompt_ids: bool = False
    score_only: bool = False
    """`max_tokens` 0: only prompt logprobs are returned, without the token that the engine samples."""
    usage: bool = False
    """Whether a stream ends with the usage."""
    continuous_usage: bool = False
    reasoning: bool = True
    hands_over: int = 0
    """If the prompt is kept for another server: the workers of each engine here, else 0."""

    @property
    def details(self) -> bool:
        """Whether chunks contain more than text."""
        return self.logprobs is not None or self.token_ids or self.continuous_usage


@dataclass(frozen=True)
class GenerateRequest:
    """`requests[p]` generates the `n` choices p * n and on, which continue `prompts[p]`."""

    id: str
    model: str
    """The name by which the client knows it."""
    operation: str
    """The operation's name in traces."""
    fingerprint: str
    created: int
    requests: list[AddRequest]
    prompts: list[Prompt]
    text: TextOptions
    options: ResponseOptions
    n: int
    streaming: bool
    warnings: list[str]
    started: float
    new_renderer: "Callable[[GenerateRequest], Renderer]"
    data_parallel_rank: int | None = None
    """None: the router chooses."""
    timeout_s: float | None = None
    """From `started` on; the request is ended then."""
    shown_bytes: int = 0
    """About how many bytes of the response show prompts."""
    trace: TraceContext | None = None

    @property
    def resume_key(self) -> str:
        """The id of its stream; empty if that cannot be resumed."""
        resumable = self.requests[0].resumable
        return "" if resumable is None else resumable.key

    @property
    def request_ids(self) -> list[int]:
        """The id of each choice."""
        return [request_id for request in self.requests for request_id in request.request_ids]

    def renderer(self) -> Renderer:
        """A new renderer of the response."""
        return self.new_renderer(self)

    def usage_counter(self) -> UsageCounter:
        """A new counter for this request."""
        tokens = sum(len(prompt.ids) for prompt in self.prompts)
        return UsageCounter(tokens, len(self.request_ids), self.n, self.started)

    def index(self, update: SequenceOutput) -> int:
        """The index of the choice of `update`: the engine ids of one request are consecutive."""
        return update.request_id - self.requests[0].request_ids[0]

    def prompt(self, index: int) -> Prompt:
        """The prompt of choice `index`."""
        return self.prompts[index // self.n]

    def echo(self, index: int) -> str:
        """The prompt text before choice `index`; empty without `echo`."""
        return (self.prompt(index).echo or "") if self.options.echo else ""

    def visible(self, update: SequenceOutput) -> SequenceOutput:
        """`update`, without the sampled token if `score_only`, and without reasoning that is not wanted."""
        if not self.options.reasoning:
            update.reasoning = ""
        if self.options.score_only:
            update.token_ids = array("i")
            update.text = ""
            update.logprobs = ()
            if update.finished and not update.error:
                update.reason = "max_tokens"
                update.stop_reason = None
        return update
