"""Keeps the text of messages from becoming control tokens such as `<|im_start|>`.

A control token is an added token of the vocabulary that is special, or that the chat template
writes. One in a client's text gets a mark after its first character, so that the tokenizer does
not take it for the token; a second tokenizer removes the marks where no added token is searched
any more. Only texts with such a string are changed, and only prompts with marks use that tokenizer.

Messages of the assistant keep the tokens that are not special and that the template looks for in
them, such as `</think>`: the model itself wrote those.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from frontend.template_source import TemplateSource
from frontend.tokenizer import Tokenizer

__all__ = ["ControlTokens"]

# Two private-use characters. Where a client's text has them, they are marked as well, and stay.
_MARK = "\uf8a3\ue0c7"
_ASSISTANT = "assistant"
# The GIL is released between pieces of this many characters.
_PIECE = 1 << 16


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

    def mark_options(self, options: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
        """(`options`, whether any text was marked)."""
        marked = self._all.mark(options)
        return marked, marked is not options


class _Marker:
    """Marks the strings `texts` in any JSON value."""

    def __init__(self, texts: Iterable[str]):
        kept = sorted({text for text in texts if text.strip()} | {_MARK}, key=len, reverse=True)
        self._longest = len(kept[0])
        self._pattern = re.compile("|".join(map(re.escape, kept)))

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
        pieces, copied, start = [], 0, 0
        while start < len(text):
            stop = start + _PIECE
            match = self._pattern.search(text, start, stop + self._longest - 1)
            if match is None or match.start() >= stop:
                start = stop
                continue
            pieces.append(text[copied : match.start() + 1])
            copied = match.start() + 1
            start = match.start() + 1
        return _MARK.join([*pieces, text[copied:]]) if pieces else text
