"""What a session has said so far, as one kind of server takes it: messages of a chat, or token ids."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atom.benchmarks.serving.datasets import TextSource
from atom.benchmarks.serving.prompts import Ids, random_ids, stable_tokens

__all__ = ["ChatContext", "Context", "IdsContext", "Tokens"]

Message = dict[str, str]


class Tokens:
    """Draws the ids that sessions consist of."""

    def __init__(self, source: TextSource, seed: int):
        self._rng = np.random.default_rng(seed)
        self.tokenizer = source.tokenizer
        self._usable: NDArray[np.int64] = (
            np.arange(source.vocab_size)
            if source.tokenizer is None
            else stable_tokens(source.tokenizer, self._rng)
        )

    def ids(self, count: int) -> Ids:
        return random_ids(self._rng, self._usable, [count])[0]

    def text(self, count: int) -> str:
        """A text of about `count` tokens."""
        assert self.tokenizer is not None, "chats are refused without a tokenizer"
        return self.tokenizer.decode_all([self.ids(count)])[0]


class Context(Protocol):
    """The conversation of one session."""

    def add_input(self, tokens: Tokens, count: int) -> None: ...

    def add_reply(self, tokens: Tokens, text: str, count: int) -> None:
        """`text` is the server's reply of `count` tokens."""

    def fork(self) -> "Context":
        """A copy that grows alone."""

    def prompt(self) -> tuple[Ids | str, dict[str, Any]]:
        """The prompt, and the fields of the body that replace it."""


class ChatContext:
    """Messages: the shared text is the system's, tool results are the user's."""

    def __init__(self, messages: Sequence[Message] = ()):
        self._messages = list(messages)

    @classmethod
    def shared(cls, tokens: Tokens, count: int) -> "ChatContext":
        return cls([{"role": "system", "content": tokens.text(count)}] if count else [])

    def add_input(self, tokens: Tokens, count: int) -> None:
        self._messages.append({"role": "user", "content": tokens.text(count)})

    def add_reply(self, tokens: Tokens, text: str, count: int) -> None:
        self._messages.append({"role": "assistant", "content": text})

    def fork(self) -> "ChatContext":
        return ChatContext(self._messages)

    def prompt(self) -> tuple[Ids | str, dict[str, Any]]:
        return "", {"messages": list(self._messages)}


class IdsContext:
    """Token ids. A reply is its text's ids; without a tokenizer, as many random ones."""

    def __init__(self, ids: Sequence[int] = ()):
        self._ids = list(ids)

    @classmethod
    def shared(cls, tokens: Tokens, count: int) -> "IdsContext":
        return cls(tokens.ids(count))

    def add_input(self, tokens: Tokens, count: int) -> None:
        self._ids += tokens.ids(count)

    def add_reply(self, tokens: Tokens, text: str, count: int) -> None:
        self._ids += tokens.ids(count) if tokens.tokenizer is None else tokens.tokenizer.encode(text)

    def fork(self) -> "IdsContext":
        return IdsContext(self._ids)

    def prompt(self) -> tuple[Ids | str, dict[str, Any]]:
        return list(self._ids), {}
