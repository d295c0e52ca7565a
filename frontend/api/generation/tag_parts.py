"""Parts of structural tags: what a grammar lets a reply be made of, in xgrammar's form."""

import re
from collections.abc import Mapping
from typing import Any

from frontend.text.reply_formats.base import ReplyFrame

__all__ = ["Format", "any_of", "as_content", "in_frame", "literal", "sequence"]

Format = dict[str, Any]


def in_frame(reply: Format, frame: ReplyFrame | None) -> Format:
    """`reply` after the reasoning that the frame allows."""
    if frame is None:
        return reply
    begin, end = (literal(marker, frame.tokens) for marker in frame.reasoning)
    reasoning = sequence(*begin, {"type": "any_text"}, *end)
    return sequence({"type": "star", "content": reasoning}, reply)


def as_content(text: Format, frame: ReplyFrame | None) -> Format:
    """`text` where the frame has content."""
    return text if frame is None else sequence(*literal(frame.content, frame.tokens), text)


def literal(text: str, tokens: Mapping[str, int]) -> list[Format]:
    """`text`, its special tokens by their ids."""
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return [
        {"type": "token", "token": tokens[part]}
        if part in tokens
        else {"type": "const_string", "value": part}
        for part in parts
        if part
    ]


def any_of(*elements: Format) -> Format:
    return {"type": "or", "elements": elements}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": elements}
