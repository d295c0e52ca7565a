"""The channels of Harmony, the response format of GPT-OSS.

    <|channel|>analysis<|message|>2 + 2 …<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>
               └header┘           └body─┘               └─────── header ────────┘           └body┘
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

Tags are single added tokens: text that only spells a tag is text.
"""

import re
from enum import Enum

from frontend.text.reply_formats.base import (
    CallDelta,
    CallText,
    ReasoningIds,
    ReplyDelta,
    ReplyFrame,
    ReplyOptions,
    ReplyParser,
    new_call_id,
)
from frontend.text.tokenizer import Tokenizer

__all__ = ["HarmonyFormat"]

# Longer text without <|message|> is content, not a header.
_LONGEST_HEADER = 512
_RECIPIENT = re.compile(r"\bto=(\S+)")
_NAMESPACE = "functions."


class _Tag(Enum):
    START = "<|start|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    MESSAGE = "<|message|>"
    END = "<|end|>"
    RETURN = "<|return|>"
    CALL = "<|call|>"


class _Body(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


class HarmonyFormat:
    """The tag ids of one vocabulary."""

    parses_calls = True
    describes_tools = False
    separates_reasoning = True
    efforts = ("low", "medium", "high")

    def __init__(self, tokenizer: Tokenizer):
        ids = {tokenizer.added_id(tag.value): tag for tag in _Tag}
        self._ids = {token_id: tag for token_id, tag in ids.items() if token_id is not None}
        self.call_text: CallText | None = None
        self.frame: ReplyFrame | None = None
        if len(self._ids) == len(_Tag):
            tokens = {tag.value: token_id for token_id, tag in self._ids.items()}
            self.call_text = CallText(
                before_name="<|channel|>commentary to=functions.",
                before_arguments=" <|constrain|>json<|message|>",
                end="",
                separator="",
                trigger="",
                tokens=tokens,
            )
            analysis = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
            self.frame = ReplyFrame(analysis, "<|channel|>final<|message|>", tokens)

    def is_needed(self, options: ReplyOptions) -> bool:
        """Always: the tags are part of every reply."""
        return True

    def parser(self, options: ReplyOptions) -> ReplyParser:
        """A parser for a new sequence."""
        return _Channels(self._ids, options)

    def ends_thinking(self, prompt_ids: list[int], prompt: str) -> bool:
        """Prompts end before the first channel."""
        return False

    def reasoning_ids(self, prompt_ids: list[int], prompt: str) -> ReasoningIds | None:
        """None: the frame has the reasoning. Without all tags no token ends it."""
        return None if self.frame is not None else ReasoningIds(inside=True, begin=None, end=None)


class _Channels:
    """Separates the text of one sequence.

    The analysis channel and messages to other tools than offered functions are reasoning. Text that does
    not follow the format is content.
    """

    def __init__(self, tags: dict[int, _Tag], options: ReplyOptions):
        self._tags = tags
        self._options = options
        self._header: str | None = None
        """The header so far, its channel on a line of its own; None outside a header."""
        self._body = _Body.CONTENT
        self._index = -1
        self._has_arguments = False

    @property
    def called(self) -> bool:
        return self._index >= 0

    def feed(self, token_id: int, text: str) -> ReplyDelta:
        if (tag := self._tags.get(token_id)) is not None:
            return self._apply(tag)
        if self._header is None:
            return self._in_body(text)
        self._header += text
        if len(self._header) <= _LONGEST_HEADER:
            return ReplyDelta()
        text = self._header.removeprefix("\n")
        self._header = None
        return ReplyDelta(text)

    def finish(self, text: str, complete: bool) -> ReplyDelta:
        if self._header is not None:
            # A call whose name is not known is content; after another call, what was cut is left out.
            is_shown = self._function(self._header) and (complete or not self.called)
            return ReplyDelta(self._header.strip() + text if is_shown else "")
        last = self._in_body(text)
        if complete:
            last.calls += self._end_call()
        return last

    def _in_body(self, text: str) -> ReplyDelta:
        if self._body is _Body.CONTENT or not text:
            return ReplyDelta(text)
        if self._body is _Body.REASONING:
            return ReplyDelta(reasoning=text)
        self._has_arguments = True
        return ReplyDelta(calls=self._shown(CallDelta(self._index, arguments=text)))

    def _apply(self, tag: _Tag) -> ReplyDelta:
        header = self._header
        self._header = None
        out = ReplyDelta(calls=self._end_call())
        self._body = _Body.CONTENT
        if tag is _Tag.START:
            self._header = ""
        elif tag in (_Tag.CHANNEL, _Tag.CONSTRAIN):
            self._header = (header or "") + ("\n" if tag is _Tag.CHANNEL else " ")
        elif tag is _Tag.MESSAGE and header is not None:
            out.calls += self._begin(header)
        return out

    def _begin(self, header: str) -> list[CallDelta]:
        """Set the kind of the message that follows `header`."""
        channel = header.rpartition("\n")[2].split()[:1]
        if (name := self._function(header)) is not None:
            self._body = _Body.CALL
            self._index += 1
            self._has_arguments = False
            return self._shown(CallDelta(self._index, new_call_id(), name))
        if channel == ["analysis"] or "to=" in header:
            self._body = _Body.REASONING
        return []

    def _function(self, header: str) -> str | None:
        """The offered function that a message is for."""
        found = _RECIPIENT.search(header)
        tools = self._options.tools
        if found is None or tools is None:
            return None
        if found[1].startswith(_NAMESPACE):
            return found[1].removeprefix(_NAMESPACE) or None
        return found[1] if found[1] in tools else None

    def _end_call(self) -> list[CallDelta]:
        ended = self._body is _Body.CALL
        self._body = _Body.CONTENT
        if not ended or self._has_arguments:
            return []
        return self._shown(CallDelta(self._index, arguments="{}"))

    def _shown(self, delta: CallDelta) -> list[CallDelta]:
        return [delta] if delta.index == 0 or self._options.parallel else []
