"""Log probabilities in the response formats of the two endpoints; prompt logprobs as in vLLM.

All are natural logarithms of the model's distribution before temperature, penalties and
filters.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

import msgspec

from frontend.api.chat.schema import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from frontend.api.completions.schema import CompletionLogprobs
from frontend.api.generation.prompts import Prompt
from frontend.api.schemas.generation import PromptLogprob, RankedLogprob
from frontend.text.token_logprobs import TokenLogprob
from frontend.text.tokenizer import Tokenizer

__all__ = [
    "TokenFormatter",
    "chat_logprobs",
    "completion_logprobs",
    "echoed_logprobs",
    "joined",
    "prompt_logprobs",
]

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
# Replaces minus infinity, which JSON cannot express.
_LOWEST = -9999.0


class TokenFormatter:
    """Formats tokens as text, or as `token_id:<id>` if requested or without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool):
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """The token's name in responses."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def text(self, token_id: int) -> str | None:
        """The token's text; None where the model has no tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's bytes; None where the model has no tokenizer."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


def chat_logprobs(tokens: TokenFormatter, entries: Sequence[TokenLogprob], top: int) -> ChatLogprobs:
    """Each token with the `top` most likely ones; it may be one of them."""
    return ChatLogprobs(
        [
            _encoded(
                ChatTokenLogprob(
                    token=tokens.name(entry.token_id),
                    logprob=_finite(entry.logprob),
                    bytes=tokens.bytes(entry.token_id),
                    top_logprobs=[
                        ChatTopLogprob(tokens.name(token_id), _finite(value), tokens.bytes(token_id))
                        for token_id, value in entry.top[:top]
                    ],
                )
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    tokens: TokenFormatter, entries: Sequence[TokenLogprob], top: int, offset: int = 0
) -> CompletionLogprobs:
    """Columns for tokens; `offset` characters of the choice's text precede the first."""
    columns = CompletionLogprobs([], [], [], [])
    for entry in entries:
        columns.tokens.append(tokens.name(entry.token_id))
        columns.token_logprobs.append(_finite(entry.logprob))
        columns.top_logprobs.append(_encoded(_by_name(tokens, entry, top)))
        columns.text_offset.append(offset + entry.offset)
    return columns


def echoed_logprobs(
    tokens: TokenFormatter, prompt: Prompt, entries: Iterable[TokenLogprob], top: int
) -> CompletionLogprobs:
    """Columns for a prompt; its first token has no log probability."""
    placed = [
        entry._replace(offset=offset) for entry, offset in zip(entries, prompt.offsets[1:], strict=True)
    ]
    first = CompletionLogprobs([tokens.name(prompt.ids[0])], [None], [None], [0])
    return joined(first, completion_logprobs(tokens, placed, top))


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """`first` and `second` concatenated."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(
    tokens: TokenFormatter, entries: Iterable[TokenLogprob], top: int
) -> list[PromptLogprob | None]:
    """One entry per prompt token; null for the first."""
    return [None, *(_encoded(_by_id(tokens, entry, top)) for entry in entries)]


def _by_id(tokens: TokenFormatter, entry: TokenLogprob, top: int) -> PromptLogprob:
    def ranked(token_id: int, value: float, rank: int) -> RankedLogprob:
        return RankedLogprob(_finite(value), rank, tokens.text(token_id))

    top_tokens = enumerate(entry.top[:top], 1)
    return {str(entry.token_id): ranked(entry.token_id, entry.logprob, entry.rank)} | {
        str(token_id): ranked(token_id, value, rank) for rank, (token_id, value) in top_tokens
    }


def _by_name(tokens: TokenFormatter, entry: TokenLogprob, top: int) -> dict[str, float]:
    values = {tokens.name(entry.token_id): _finite(entry.logprob)}
    for token_id, value in entry.top[:top]:
        name = tokens.name(token_id)
        values[name] = max(_finite(value), values.get(name, _LOWEST))
    return values


def _encoded(entry: T) -> T:
    """`entry` as JSON, to be encoded as it is.

    Encoding a whole response holds the GIL until it is done, entry by entry it does not.
    """
    return cast(T, msgspec.Raw(_encode(entry)))


def _finite(value: float) -> float:
    return max(value, _LOWEST)
