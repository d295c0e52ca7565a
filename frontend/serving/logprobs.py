"""Log probabilities in the forms of the two endpoints, and in vLLM's for prompts.

All are natural logarithms of the model's own distribution, before temperature, penalties and
filters, as vLLM reports them by default.
"""

from collections.abc import Sequence

from frontend.schemas.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from frontend.schemas.completions import CompletionLogprobs
from frontend.schemas.generation import PromptLogprob, RankedLogprob
from frontend.serving.prompts import Prompt
from frontend.token_logprobs import TokenLogprob
from frontend.tokenizer import Tokenizer

__all__ = [
    "TokenNames",
    "chat_logprobs",
    "completion_logprobs",
    "echoed_logprobs",
    "joined",
    "prompt_logprobs",
]

# Stands for minus infinity, which JSON cannot say.
_LOWEST = -9999.0


class TokenNames:
    """How tokens are called: by their text, or as `token_id:<id>` where asked for or without one."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool):
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """For people, and as a key."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def text(self, token_id: int) -> str | None:
        """The token's text; None where the model has no tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's bytes; None where the model has no tokenizer."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


def chat_logprobs(names: TokenNames, entries: Sequence[TokenLogprob], top: int) -> ChatLogprobs:
    """The `top` most likely tokens are shown beside each; that token may be among them."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                token=names.name(entry.token_id),
                logprob=_finite(entry.logprob),
                bytes=names.bytes(entry.token_id),
                top_logprobs=[
                    ChatTopLogprob(names.name(token_id), _finite(value), names.bytes(token_id))
                    for token_id, value in entry.top[:top]
                ],
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    names: TokenNames, entries: Sequence[TokenLogprob], top: int, offset: int = 0
) -> CompletionLogprobs:
    """Columns for tokens whose text begins `offset` characters into the choice's text."""
    return CompletionLogprobs(
        tokens=[names.name(entry.token_id) for entry in entries],
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        top_logprobs=[_by_name(names, entry, top) for entry in entries],
        text_offset=[offset + entry.offset for entry in entries],
    )


def echoed_logprobs(
    names: TokenNames, prompt: Prompt, entries: Sequence[TokenLogprob], top: int
) -> CompletionLogprobs:
    """Columns for a prompt, of whose tokens all but the first have an entry."""
    placed = [
        entry._replace(offset=offset) for entry, offset in zip(entries, prompt.offsets[1:], strict=True)
    ]
    first = CompletionLogprobs([names.name(prompt.ids[0])], [None], [None], [0])
    return joined(first, completion_logprobs(names, placed, top))


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The columns of `first`, then those of `second`."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(
    names: TokenNames, entries: Sequence[TokenLogprob], top: int
) -> list[PromptLogprob | None]:
    """One for each token of a prompt; null for the first."""
    return [None, *(_by_id(names, entry, top) for entry in entries)]


def _by_id(names: TokenNames, entry: TokenLogprob, top: int) -> PromptLogprob:
    def ranked(token_id: int, value: float, rank: int) -> RankedLogprob:
        return RankedLogprob(_finite(value), rank, names.text(token_id))

    likely = enumerate(entry.top[:top], 1)
    return {str(entry.token_id): ranked(entry.token_id, entry.logprob, entry.rank)} | {
        str(token_id): ranked(token_id, value, rank) for rank, (token_id, value) in likely
    }


def _by_name(names: TokenNames, entry: TokenLogprob, top: int) -> dict[str, float]:
    values = {names.name(entry.token_id): _finite(entry.logprob)}
    for token_id, value in entry.top[:top]:
        name = names.name(token_id)
        values[name] = max(_finite(value), values.get(name, _LOWEST))
    return values


def _finite(value: float) -> float:
    return max(value, _LOWEST)
