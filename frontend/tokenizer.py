"""Encodes text and decodes token ids with a tokenizer.json."""

import functools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from atom.config.checkpoint import Checkpoint

__all__ = ["Tokenizer", "TooManyTokensError"]

# Each call of the library runs in the calling thread. In the library's own pool, which has one
# thread per core, short texts would wait for long ones.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_CACHED_TOKENS = 1 << 16
# Texts with more characters per allowed token than this (English has 4 to 5) are counted in
# chunks before they are encoded as a whole.
_CHARS_PER_TOKEN = 4
_CHUNK_CHARS = 64 * 1024
# A chunk is cut at white space, if there is some among this many characters at its end.
_CUT_CHARS = 1024
# Chunks have more tokens than the same text in one piece, but never this many times more.
_CHUNK_MARGIN = 1.25


class TooManyTokensError(ValueError):
    """A text has more tokens than allowed: `count`, or more if not `exact`."""

    def __init__(self, count: int, exact: bool):
        super().__init__(f"the text has {'' if exact else 'more than '}{count} tokens")
        self.count = count
        self.exact = exact


class Tokenizer:
    """A checkpoint's tokenizer. Safe to use in any thread.

    Only the library's batch calls release the GIL, so single texts are encoded and decoded by
    them too.
    """

    def __init__(self, backend: tokenizers.Tokenizer, leading_id: int | None = None):
        """`leading_id` is put before prompts if the post-processor does not do so."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._leading_id = leading_id
        self._kinds = frozenset(_decoder_kinds(json.loads(backend.to_str())["decoder"]))
        self._added = backend.get_added_tokens_decoder()
        self._letter = backend.encode_batch_fast(["a"], add_special_tokens=False)[0].ids[-1:]
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

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`, by default with the special tokens at the beginning and end of prompts.

        Raises TooManyTokensError if there are more than `max_tokens`, for long texts without
        encoding all of it.
        """
        if max_tokens is not None and len(text) > max(max_tokens * _CHARS_PER_TOKEN, _CHUNK_CHARS):
            self._check_count(text, max_tokens)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokensError(len(encoding), exact=True)
        ids: list[int] = encoding.ids
        if add_special_tokens and self._leading_id is not None and ids[:1] != [self._leading_id]:
            ids.insert(0, self._leading_id)
        return ids

    def _check_count(self, text: str, max_tokens: int) -> None:
        """Raise TooManyTokensError once the chunks of `text` have too many tokens."""
        count = 0
        for chunk in _chunks(text):
            (encoding,) = self._backend.encode_batch_fast([chunk], add_special_tokens=False)
            count += len(encoding)
            if count > max_tokens * _CHUNK_MARGIN:
                raise TooManyTokensError(max_tokens, exact=False)

    def added_id(self, text: str) -> int | None:
        """The id of the added token `text`; None if there is none."""
        return next((i for i, token in self._added.items() if token.content == text), None)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

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


def _chunks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + _CHUNK_CHARS
        if stop < len(text):
            cut = max(text.rfind(space, stop - _CUT_CHARS, stop) for space in " \n")
            stop = cut if cut > 0 else stop
        yield text[start:stop]
        start = stop


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
