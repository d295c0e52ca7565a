"""Keeps the text of messages from becoming control tokens such as `<|im_start|>`.

A control token is an added token of the vocabulary that is special, or that the chat template
writes. In a client's text, its string gets a mark after the first character, so that the tokenizer
does not find the token; a second tokenizer removes the marks after it has searched for added tokens.
Only texts with such a string are changed, and only prompts with marks use that tokenizer.

Messages of the assistant keep the tokens that are not special and that the template searches for,
such as `</think>`: the model itself generated them.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from frontend.text.template_source import TemplateSource
from frontend.text.tokenizer import Tokenizer

__all__ = ["ControlTokens"]

V = TypeVar("V")

# Two private-use characters. In a client's text they are marked as well, and so preserved.
_MARK = "\uf8a3\ue0c7"
_ASSISTANT = "assistant"
# The GIL is released between searches of this many characters.
_CHUNK_CHARS = 1 << 16


class ControlTokens:
    """The control tokens of one model."""

    def __init__(self, tokenizer: Tokenizer, template: TemplateSource):
        added = tokenizer.added_tokens()
        control = {text for text, special in added.items() if special or template.writes(text)}
        own = {text for text in control if not added[text] and template.searches(text)}
        self._all = _Marker(control)
        self._in_replies = _Marker(control - own)
        self.tokenizer = tokenizer.without(_MARK)
        """Encodes texts with marks."""

    def mark(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
        """(`messages`, whether any text was marked)."""
        marked = [
            (self._in_replies if message["role"] == _ASSISTANT else self._all).mark(message)
            for message in messages
        ]
        changed = any(new is not old for new, old in zip(marked, messages, strict=True))
        return (marked if changed else messages), changed

    def mark_value(self, value: V) -> tuple[V, bool]:
        """(`value` with marks, whether any text in it was marked)."""
        marked: V = self._all.mark(value)
        return marked, marked is not value


class _Marker:
    """Marks the strings `texts` in any JSON value."""

    def __init__(self, texts: Iterable[str]):
        kept = sorted({text for text in texts if text.strip()} | {_MARK}, key=len, reverse=True)
        self._longest = len(kept[0])
        self._pattern = re.compile(_alternation(kept))

    def mark(self, value: Any) -> Any:
        """`value` itself if it has none of the strings, else a copy with marks."""
        match value:
            case str():
                return self._mark_text(value)
            case list():
                items = [self.mark(item) for item in value]
                return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
            case Mapping():
                pairs = {self.mark(name): self.mark(item) for name, item in value.items()}
                same = all(
                    a is b and c is d for (a, c), (b, d) in zip(pairs.items(), value.items(), strict=True)
                )
                return value if same else pairs
        return value

    def _mark_text(self, text: str) -> str:
        parts = []
        copied = 0
        start = 0
        while start < len(text):
            stop = start + _CHUNK_CHARS
            match = self._pattern.search(text, start, stop + self._longest - 1)
            if match is None or match.start() >= stop:
                start = stop
                continue
            parts.append(text[copied : match.start() + 1])
            copied = match.start() + 1
            start = match.start() + 1
        return _MARK.join([*parts, text[copied:]]) if parts else text


def _alternation(texts: Iterable[str]) -> str:
    """A pattern of one of `texts`, the longest that fits.

    It is a tree: alternatives of a group begin with different characters. So a search takes as long for a
    thousand tokens with a common beginning as for one; tried one after another, they would hold the GIL for
    a quarter of a second in a chunk of such beginnings.
    """
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[0], []).append(text)
    return "|".join(map(_branch, groups.values()))


def _branch(texts: list[str]) -> str:
    """A pattern of `texts`, which begin with the same character."""
    # what these two have in common, all have
    first = min(texts)
    last = max(texts)
    pairs = zip(first, last, strict=False)
    prefix = first[: next((index for index, (a, b) in enumerate(pairs) if a != b), len(first))]
    rests = {text[len(prefix) :] for text in texts}
    others = sorted(rests - {""})
    if not others:
        return re.escape(prefix)
    return f"{re.escape(prefix)}(?:{_alternation(others)}){'?' if '' in rests else ''}"
