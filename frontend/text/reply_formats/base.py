"""What a reply parser takes and returns.

A parser belongs to one sequence. It takes one token at a time, at a cost that does not depend on the tokens
before it, and returns new text, reasoning and tool calls. Joined over all tokens they do not depend on how
the tokens cut the text.
"""

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

__all__ = [
    "CallDelta",
    "CallText",
    "ReasoningIds",
    "ReplyDelta",
    "ReplyFormat",
    "ReplyFrame",
    "ReplyOptions",
    "ReplyParser",
    "call_characters",
    "call_ids",
    "merge_calls",
    "new_call_id",
]


class CallDelta(msgspec.Struct, gc=False):
    """The beginning of a tool call, which has its id and name, or more of its arguments."""

    index: int
    """The number of the call in its reply, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """JSON text. If the model wrote no valid JSON, what it wrote."""


class ReplyDelta(msgspec.Struct):
    """What one token adds to a reply."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []

    @property
    def characters(self) -> int:
        """The number of characters added."""
        return len(self.text) + len(self.reasoning) + call_characters(self.calls)


@dataclass(frozen=True)
class ReplyOptions:
    """What the parsers of one request must know about it."""

    tools: Mapping[str, Mapping[str, Any]] | None = None
    """The parameter schema of each offered function; None: tool calls are not parsed."""
    thinking: bool = False
    """Whether the prompt ends inside of the reasoning."""
    parallel: bool = True
    """False: only the first tool call is returned."""
    enforced: bool = False
    """Whether a grammar enforces the format of calls: no marker in a string of the arguments ends it."""
    kinds: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """The JSON types of parameters, found so far."""


@dataclass(frozen=True)
class CallText:
    """How a model writes the calls of functions.

    [section begin] call separator call … [section end], where a call is `before_name`, the name, `number`,
    `before_arguments`, the arguments, `end`.
    """

    before_name: str
    before_arguments: str
    end: str
    separator: str
    """Between two calls."""
    trigger: str
    """The beginning of all calls, or of each, that stands in no other text; empty: there is none."""
    section: tuple[str, str] = ("", "")
    """Around all calls."""
    number: str = ""
    """A regular expression."""
    style: str = "json"
    """How arguments are written, by xgrammar's name, or "python"."""
    no_content: tuple[str, ...] = ()
    """Markers besides `trigger` with which a call could begin in other text."""
    other_begin: str = ""
    """How a reply without calls begins, where there is no trigger: a regular expression."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """The ids of the markers that are special tokens, which have no text for a grammar."""

    @property
    def markup(self) -> str:
        """All that is written besides names and arguments, in no order."""
        parts = self.before_name, self.before_arguments, self.end, self.separator, *self.section
        return "\n".join(parts)


@dataclass(frozen=True)
class ReplyFrame:
    """The markers around the parts of a reply, where a grammar must begin with the reply itself."""

    reasoning: tuple[str, str]
    """Around each part of the reasoning, of which there may be several before the content."""
    content: str
    """Before the content."""
    tokens: Mapping[str, int]
    """The ids of the special tokens in these markers."""


@dataclass(frozen=True)
class ReasoningIds:
    """The tokens that mark the reasoning of a reply: structured output begins after it."""

    inside: bool
    """Whether the reply begins inside of the reasoning."""
    begin: int | None
    """The token with which a reply may begin its reasoning; None: it cannot."""
    end: int | None
    """None: no single token ends it."""


class ReplyParser(Protocol):
    """Parses the reply of one sequence."""

    @property
    def called(self) -> bool:
        """Whether the reply has a tool call so far."""

    def feed(self, token_id: int, text: str) -> ReplyDelta:
        """The result of one token; `text` is what it added to the detokenized text."""

    def finish(self, text: str, complete: bool) -> ReplyDelta:
        """The result of the last `text`, and all that was held back.

        `complete` is false if the model did not end the reply itself.
        """


class ReplyFormat(Protocol):
    """The format of one model's replies."""

    @property
    def parses_calls(self) -> bool:
        """Whether tool calls can be parsed."""

    @property
    def describes_tools(self) -> bool:
        """Whether a system message tells the model of tools and this format, in place of its template."""

    @property
    def call_text(self) -> CallText | None:
        """How calls are written; None where it cannot be enforced."""

    @property
    def frame(self) -> ReplyFrame | None:
        """None: the content needs no marker, and structured output begins after the reasoning."""

    @property
    def separates_reasoning(self) -> bool:
        """Whether reasoning is told from content."""

    @property
    def efforts(self) -> tuple[str, ...] | None:
        """The values of `reasoning_effort` that the model knows; None: its template decides."""

    def is_needed(self, options: ReplyOptions) -> bool:
        """Whether replies must be parsed at all."""

    def parser(self, options: ReplyOptions) -> ReplyParser:
        """A parser for a new sequence."""

    def ends_thinking(self, prompt_ids: list[int], prompt: str) -> bool:
        """Whether a prompt ends inside of the reasoning."""

    def reasoning_ids(self, prompt_ids: list[int], prompt: str) -> ReasoningIds | None:
        """How the reply to a prompt marks its reasoning; None: it has none."""


_call_ids: ContextVar[Iterator[str] | None] = ContextVar("call ids", default=None)


@contextlib.contextmanager
def call_ids(ids: Iterator[str]) -> Iterator[None]:
    """Inside the block, `new_call_id` takes the next one of `ids`."""
    token = _call_ids.set(ids)
    try:
        yield
    finally:
        _call_ids.reset(token)


def new_call_id() -> str:
    """A random id, or one of `call_ids`."""
    ids = _call_ids.get()
    return f"call_{secrets.token_hex(12)}" if ids is None else next(ids)


def merge_calls(calls: list[CallDelta], later: Iterable[CallDelta]) -> None:
    """Append the deltas `later`; pieces of one call are joined."""
    for delta in later:
        if calls and calls[-1].index == delta.index:
            calls[-1].arguments += delta.arguments
        else:
            calls.append(delta)


def call_characters(calls: Iterable[CallDelta]) -> int:
    """The number of characters in names and arguments."""
    return sum(len(call.name) + len(call.arguments) for call in calls)
