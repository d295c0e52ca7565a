"""The text of one token, in each kind of vocabulary."""

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer


@settings(deadline=None, database=None)
@given(st.text(max_size=30))
def test_bytes_of_a_byte_level_vocabulary_join_to_the_text(text: str) -> None:
    tokenizer = tiny_tokenizer.tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_every_byte_level_token_reads_as_it_decodes() -> None:
    tokenizer = tiny_tokenizer.tokenizer()
    for token_id in range(360):
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        assert tokenizer.token_text(token_id) == alone


def byte_fallback() -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "a": 258, "▁": 259}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def test_byte_fallback_vocabularies() -> None:
    tokenizer = byte_fallback()
    # The decoder strips the space at the beginning of a text; the token has it all the same.
    assert [tokenizer.token_bytes(i) for i in (0xE4, 256, 257)] == [b"\xe4", b" a", b"b"]
    assert tokenizer.token_text(0xE4) == "\ufffd"


def test_word_piece_vocabularies() -> None:
    backend = tokenizers.Tokenizer(
        models.WordPiece({"a": 0, "bc": 1, "##d": 2, "[UNK]": 3}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_text(i) for i in (1, 2)] == [" bc", "d"]


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert tiny_tokenizer.tokenizer().token_bytes(5000) == b""


def test_added_tokens_decode_to_their_own_text() -> None:
    assert tiny_tokenizer.tokenizer().token_bytes(1) == b"</s>"
