"""A request that passed every check, and what its answer is to show."""

from array import array
from dataclasses import dataclass

from atom.messages.engine import AddRequest
from frontend.output_processor import TextOptions, Update
from frontend.serving.logprobs import TokenNames
from frontend.serving.prompts import Prompt
from frontend.serving.usage import UsageCounter

__all__ = ["GenerateRequest", "ResponseOptions"]


@dataclass(frozen=True)
class ResponseOptions:
    """What an answer has beside the generated text."""

    names: TokenNames
    logprobs: int | None = None
    """How many of the most likely tokens beside each one."""
    prompt_logprobs: int | None = None
    echo: bool = False
    token_ids: bool = False
    prompt_ids: bool = False
    score_only: bool = False
    """No token was asked for: the one that a prompt's log probabilities cost is left out."""
    continuous_usage: bool = False

    @property
    def details(self) -> bool:
        """Whether chunks hold more than text."""
        return self.logprobs is not None or self.token_ids or self.continuous_usage


@dataclass(frozen=True)
class GenerateRequest:
    """`requests[i]` makes choice i, which goes on after `prompts[i // n]`."""

    id: str
    created: int
    requests: list[AddRequest]
    prompts: list[Prompt]
    text: TextOptions
    shown: ResponseOptions
    n: int
    streaming: bool
    include_usage: bool
    warnings: list[str]
    started: float

    def tally(self) -> UsageCounter:
        """A fresh count for this job."""
        tokens = sum(len(prompt.ids) for prompt in self.prompts)
        return UsageCounter(tokens, len(self.requests), self.n, self.started)

    def index(self, update: Update) -> int:
        """The choice that an update belongs to: ids of one job follow each other."""
        return update.request_id - self.requests[0].request_id

    def prompt(self, index: int) -> Prompt:
        """The prompt of choice `index`."""
        return self.prompts[index // self.n]

    def echo(self, index: int) -> str:
        """What the text of choice `index` begins with."""
        return (self.prompt(index).echo or "") if self.shown.echo else ""

    def fit_to_show(self, update: Update) -> Update:
        """`update` without what was generated, if nothing was asked for."""
        if self.shown.score_only:
            update.token_ids, update.text, update.logprobs = array("i"), "", ()
            if update.finished and not update.error:
                update.reason, update.stop_reason = "max_tokens", None
        return update
