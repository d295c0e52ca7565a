"""Encodes text and decodes token ids with a tokenizer.json."""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.utils.token_pieces import TokenPieces

__all__ = ["Tokenizer", "TooManyTokensError"]

# Each call of the library runs in the calling thread. In the library's own pool, which has one
# thread per core, short texts would wait for long ones.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

_CACHED_TOKENS = 1 << 16
# Decoders that decode each token by itself, except at the beginning of a text.
_TEXT_KINDS = frozenset({"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"})
# Texts with more characters per allowed token than this (English has 4 to 5) are counted in
# chunks before they are encoded as a whole.
_CHARS_PER_TOKEN = 4
_CHUNK_CHARS = 64 * 1024
# A chunk is cut at white space, if there is some among this many characters at its end.
_CUT_CHARS = 1024
# Chunks have a few more tokens than the whole text: by its chunks a text is refused only beyond this
# multiple of the limit, and it is counted exactly below it.
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
        pieces = TokenPieces(backend)
        self.leading_strip = _leading_strip(pieces.decoders)
        """(character, how many of it) that decoding removes at the beginning of a text."""
        self._added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(self._added)
        """The ids of all added tokens."""
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        """The ids that `skip_special_tokens` leaves out."""
        self.is_byte_level = pieces.kinds == {"ByteLevel"}
        """Whether decoding joins the bytes of all ids."""
        self.joins_pieces = pieces.kinds <= _TEXT_KINDS
        """Whether decoding joins the `piece` of each id, except at the beginning of a text."""
        self._letter = pieces.letter
        self.piece = functools.lru_cache(_CACHED_TOKENS)(pieces.piece)
        """What an id adds to a text: bytes, perhaps of a part of a character, or text. None for an id
        beyond the tokenizer's, since models may have more. Cached."""

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

    def added_tokens(self) -> dict[str, bool]:
        """The texts of the added tokens, and whether each is special."""
        return {token.content: token.special for token in self._added.values()}

    def without(self, text: str) -> "Tokenizer":
        """A copy that removes `text`, after it has searched for added tokens."""
        settings = json.loads(self._backend.to_str())
        removal = {"type": "Replace", "pattern": {"String": text}, "content": ""}
        normalizers = [removal] + ([settings["normalizer"]] if settings["normalizer"] else [])
        settings["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
        for token in settings["added_tokens"]:  # normalized ones are recognized after the removal
            token["normalized"] = False
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(settings)), self._leading_id)

    def added_id(self, text: str) -> int | None:
        """The id of the added token `text`; None if there is none."""
        return next((i for i, token in self._added.items() if token.content == text), None)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def text_after(self, last: int, token_id: int) -> str:
        """The text that `token_id` adds after the id `last`, for any decoder."""
        before = self.decode([*self._letter, last], skip_special_tokens=False)
        return self.decode([*self._letter, last, token_id], skip_special_tokens=False)[len(before) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id, perhaps part of a character; empty for an id it does not have."""
        piece = self.piece(token_id) or b""
        return piece.encode() if isinstance(piece, str) else piece

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with replacement characters for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _chunks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + _CHUNK_CHARS
        if stop < len(text):
            cut = max(text.rfind(space, stop - _CUT_CHARS, stop) for space in " \n")
            stop = cut if cut > 0 else stop
        yield text[start:stop]
        start = stop


def _leading_strip(parts: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    kinds = [part["type"] for part in parts]
    if kinds[-2:] != ["Fuse", "Strip"] or "Metaspace" in kinds:
        return "", 0
    return parts[-1]["content"], parts[-1]["start"]
