"""Encodes text and decodes token ids with a tokenizer.json."""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from atom.config.checkpoint import Checkpoint

__all__ = ["Tokenizer"]

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_CACHED_TOKENS = 1 << 16


class Tokenizer:
    """A checkpoint's tokenizer. Encoding releases the GIL, and may run in any thread."""

    def __init__(self, backend: tokenizers.Tokenizer, leading_id: int | None = None):
        """`leading_id` is put before prompts if the post-processor does not do so."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._leading_id = leading_id
        self._kinds = frozenset(_decoder_kinds(json.loads(backend.to_str())["decoder"]))
        self._added = backend.get_added_tokens_decoder()
        self._letter = backend.encode("a", add_special_tokens=False).ids[-1:]
        self.token_bytes = functools.lru_cache(_CACHED_TOKENS)(self._token_bytes)
        """The bytes of one id, perhaps part of a character; cached."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "Tokenizer | None":
        """None for a checkpoint without a tokenizer. Raises ValueError for an invalid file."""
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
                    f"{checkpoint.tokenizer_file} has no id for the bos_token (add_bos_token is set)"
                )
        return cls(backend, leading_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with the special tokens at the beginning and end of prompts."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._leading_id is not None and ids[:1] != [self._leading_id]:
            ids.insert(0, self._leading_id)
        return ids

    def added_id(self, text: str) -> int | None:
        """The id of the added token `text`; None if there is none."""
        return next((i for i, token in self._added.items() if token.content == text), None)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> DecodeStream:
        """An incremental decoder that continues after `context`."""
        return DecodeStream(ids=list(context), skip_special_tokens=skip_special_tokens)

    def step(self, stream: DecodeStream, token_id: int) -> str | None:
        """The text that `token_id` completes; None while a character is incomplete."""
        return stream.step(self._backend, token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with replacement characters for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""  # the model's vocabulary is padded
        if added := self._added.get(token_id):
            return added.content.encode()
        if "ByteLevel" in self._kinds:
            return b"".join(_BYTE_OF.get(character) or character.encode() for character in token)
        if "ByteFallback" in self._kinds and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        # Decoders treat the beginning of a text differently, so decode the token after a letter.
        before = self.decode(self._letter, skip_special_tokens=False)
        both = self.decode([*self._letter, token_id], skip_special_tokens=False)
        return both[len(before) :].encode()


def _decoder_kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    """The types of a decoder and its parts."""
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _decoder_kinds(part)


def _byte_level_alphabet() -> dict[str, bytes]:
    """Byte-level vocabularies write each byte as one printable character.

    Printable Latin-1 bytes map to themselves, the others in order to U+0100 and up.
    """
    alphabet, others = {}, 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD):
            alphabet[chr(byte)] = bytes([byte])
        else:
            alphabet[chr(0x100 + others)] = bytes([byte])
            others += 1
    return alphabet


_BYTE_OF = _byte_level_alphabet()
