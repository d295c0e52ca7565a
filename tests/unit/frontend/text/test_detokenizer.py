"""Incremental text equals decoding at once."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from frontend.text.detokenizer import Detokenizer, decode
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer

TOKENIZER = tiny_tokenizer.tokenizer()
VOCABULARY = 360

TEXTS = [
    "plain words",
    "emoji 👩‍👩‍👧‍👦 and flags 🇨🇳🇩🇪",
    "你好，世界。今天天气很好。",
    "  leading and trailing  \n\n\ttabs ",
    "é combining e\u0301 ﷽ \u200b zero width",
    "\ufffd a real replacement character \ufffd\ufffd",
    "",
]


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.feed(token_id))
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_tokens_join_to_the_whole_text(text: str) -> None:
    assert "".join(stream(TOKENIZER, TOKENIZER.encode(text, add_special_tokens=False))) == text


@settings(deadline=None, database=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
def test_any_ids_give_what_decoding_at_once_gives(ids: list[int]) -> None:
    # Random ids break characters, end inside them, and hold special tokens.
    assert "".join(stream(TOKENIZER, ids)) == TOKENIZER.decode(ids)


def test_a_broken_character_is_held_back_until_it_ends() -> None:
    ids = TOKENIZER.encode("🦊", add_special_tokens=False)
    assert len(ids) == 4
    assert stream(TOKENIZER, ids) == ["", "", "", "🦊", ""]
    assert stream(TOKENIZER, ids[:3]) == ["", "", "", "\ufffd"]


BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = ["a", "▁", "▁a", "b", "▁▁", "é", "▁the▁cat", "##d", "bc", ".", "n't", "</w>", "x</w>"]


def vocabulary(
    decoder: Any, *, byte_tokens: bool = True, tags: tuple[str, ...] = ("<s>", "</s>")
) -> Tokenizer:
    """Byte tokens (perhaps), words, special tokens, and an added token that is not special."""
    names = ([*BYTES] if byte_tokens else []) + WORDS
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.decoder = decoder
    backend.add_special_tokens([tokenizers.AddedToken(tag) for tag in tags])
    backend.add_tokens([tokenizers.AddedToken("▁plain▁tag")])
    return Tokenizer(backend)


def llama_decoder(strip: int = 1) -> Any:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", strip, 0)] if strip else parts)


KINDS = {
    "byte level": TOKENIZER,
    "byte level with tags": Tokenizer(tiny_tokenizer.build(["<|im_end|>", "<｜tag▁with▁marks｜>"])),
    "byte fallback": vocabulary(llama_decoder(0)),
    "byte fallback, stripped": vocabulary(llama_decoder(1)),
    "byte fallback, two stripped": vocabulary(llama_decoder(2)),
    "metaspace": vocabulary(decoders.Metaspace(), byte_tokens=False),
    "metaspace, never": vocabulary(decoders.Metaspace(prepend_scheme="never"), byte_tokens=False),
    "word piece": vocabulary(decoders.WordPiece(cleanup=True), byte_tokens=False),
    "suffixes": vocabulary(decoders.BPEDecoder(), byte_tokens=False),
    "none": vocabulary(None, byte_tokens=False),
}


def has_invalid_run(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Whether byte tokens in a row are not UTF-8: the library replaces all of them then."""
    run = b""
    for token_id in [*ids, -1]:
        if skip and token_id in tokenizer.special_ids:
            continue
        piece = tokenizer.piece(token_id) if token_id >= 0 else ""
        if isinstance(piece, bytes):
            run += piece
        elif piece is not None:
            try:
                run.decode()
            except UnicodeDecodeError:
                return True
            run = b""
    return False


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, database=None, max_examples=60)
@given(data=st.data())
def test_any_ids_of_any_vocabulary(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    size = tokenizer._backend.get_vocab_size()
    rare = st.integers(0, size - 1)
    common = st.integers(max(size - len(WORDS) - 3, 0), size + 1)  # words, tags and unknown ids
    ids = data.draw(st.lists(st.one_of(rare, common), max_size=40))
    text = "".join(stream(tokenizer, ids, skip))
    assert text == decode(tokenizer, ids, skip)
    if tokenizer.is_byte_level or not has_invalid_run(tokenizer, ids, skip):
        assert text == tokenizer.decode(ids, skip)


@settings(deadline=None, database=None)
@given(st.text(max_size=20))
def test_byte_tokens_become_the_text(text: str) -> None:
    tokenizer = KINDS["byte fallback"]
    assert "".join(stream(tokenizer, list(text.encode()))) == text


@settings(deadline=None, database=None)
@given(st.lists(st.integers(0x80, 0xFF), min_size=1, max_size=20))
def test_invalid_bytes_alone_become_what_the_library_gives(ids: list[int]) -> None:
    tokenizer = KINDS["byte fallback"]
    text = "".join(stream(tokenizer, ids))
    if set(text) == {"\ufffd"}:
        assert text == tokenizer.decode(ids)


def test_an_invalid_byte_keeps_the_characters_before_it() -> None:
    ids = [*"你".encode(), 0xFF, *b"ok"]
    assert stream(KINDS["byte fallback"], ids)[-4:] == ["\ufffd", "o", "k", ""]
    assert decode(KINDS["byte fallback"], ids) == "你\ufffdok"


class Counter:
    """A backend that counts the ids that are decoded."""

    def __init__(self, backend: Any):
        self._backend = backend
        self.ids = 0

    def decode_batch(self, lists: list[list[int]], **options: Any) -> list[str]:
        self.ids += sum(map(len, lists))
        texts: list[str] = self._backend.decode_batch(lists, **options)
        return texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_of_decoding_is_linear(kind: str) -> None:
    """Also for invalid bytes, parts of characters, skipped and repeated tokens."""
    backend = KINDS[kind]._backend
    tokenizer = Tokenizer(backend)
    counter = Counter(backend)
    tokenizer._backend = counter  # type: ignore[assignment]
    special = min(tokenizer.special_ids)
    for ids in ([0xFF] * 4000, [0xE4] * 4000, [special] * 4000, [4, special, special] * 1500):
        counter.ids = 0
        stream(tokenizer, [token_id % backend.get_vocab_size() for token_id in ids])
        assert counter.ids <= 8 * len(ids) + 16
