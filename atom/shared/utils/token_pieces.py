"""What each id of a tokenizer adds to a text."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """The pieces of text that a tokenizer.json's decoder joins. Safe to use in any thread."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self.decoders = list(_decoder_parts(json.loads(backend.to_str())["decoder"]))
        """The decoder, or the decoders that a sequence consists of, as in tokenizer.json."""
        self.kinds = frozenset(part["type"] for part in self.decoders)
        self.letter: list[int] = backend.encode_batch_fast(["a"], add_special_tokens=False)[0].ids[-1:]
        """The id of a letter: decoders treat the beginning of a text differently."""

    def piece(self, token_id: int) -> bytes | str | None:
        """What an id adds to a text: bytes, perhaps of a part of a character, or text.

        None for an id beyond the tokenizer's, since models may have more.
        """
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if "ByteLevel" in self.kinds:  # as the library does, also for added tokens
            if all(character in _BYTE_OF for character in token):
                return b"".join(_BYTE_OF[character] for character in token)
            return token.encode()
        if "ByteFallback" in self.kinds and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        before = self._decode(self.letter)
        return self._decode([*self.letter, token_id])[len(before) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The piece of an id as bytes; empty for an id that the tokenizer does not have."""
        piece = self.piece(token_id) or b""
        return piece.encode() if isinstance(piece, str) else piece

    def _decode(self, ids: Sequence[int]) -> str:
        # Only the library's batch calls release the GIL.
        text: str = self._backend.decode_batch([ids], skip_special_tokens=False)[0]
        return text


def _decoder_parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A decoder, or the decoders that a sequence consists of."""
    if decoder is None:
        return
    if decoder["type"] != "Sequence":
        yield decoder
    for part in decoder.get("decoders", ()):
        yield from _decoder_parts(part)


def _byte_level_alphabet() -> dict[str, bytes]:
    """Byte-level vocabularies write each byte as one printable character.

    Printable Latin-1 bytes map to themselves, the others in order to U+0100 and up.
    """
    alphabet = {}
    others = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD):
            alphabet[chr(byte)] = bytes([byte])
        else:
            alphabet[chr(0x100 + others)] = bytes([byte])
            others += 1
    return alphabet


_BYTE_OF = _byte_level_alphabet()
