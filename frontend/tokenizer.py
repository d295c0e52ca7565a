"""Text to token ids and back, from one tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from atom.config.checkpoint import Checkpoint

__all__ = ["Tokenizer"]


class Tokenizer:
    """A checkpoint's tokenizer. Encoding releases the GIL, and may run in any thread."""

    def __init__(self, backend: tokenizers.Tokenizer, leading_id: int | None = None):
        """`leading_id` is put before prompts whose own post-processor does not do so."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._leading_id = leading_id

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "Tokenizer | None":
        """None for a checkpoint that serves token ids only; ValueError for a broken file."""
        if checkpoint.tokenizer_file is None:
            return None
        try:
            backend = tokenizers.Tokenizer.from_buffer(Path(checkpoint.tokenizer_file).read_bytes())
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"cannot read {checkpoint.tokenizer_file}: {error}") from error
        leading_id = None
        if checkpoint.add_bos_token:
            leading_id = backend.token_to_id(checkpoint.template_tokens.get("bos_token", ""))
            if leading_id is None:
                raise ValueError(
                    f"{checkpoint.tokenizer_file} has no id for the bos_token that prompts begin with"
                )
        return cls(backend, leading_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with special tokens, as a plain prompt begins and ends."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._leading_id is not None and ids[:1] != [self._leading_id]:
            ids.insert(0, self._leading_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def stream(self, context: Sequence[int] = ()) -> DecodeStream:
        """An incremental decoder that goes on after `context`."""
        return DecodeStream(ids=list(context), skip_special_tokens=True)

    def step(self, stream: DecodeStream, token_id: int) -> str | None:
        """The text that `token_id` completes; None while a character is incomplete."""
        return stream.step(self._backend, token_id)
