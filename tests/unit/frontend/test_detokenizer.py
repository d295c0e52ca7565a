"""Incremental text equals decoding at once, and stop strings do not depend on token borders."""

import itertools
from array import array

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from frontend.detokenizer import Detokenizer, StopFinder
from frontend.tokenizer import Tokenizer
from tests.helpers import tiny_tokenizer

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


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    record = array("i")
    detokenizer = Detokenizer(tokenizer, record)
    pieces = []
    for token_id in ids:
        record.append(token_id)
        pieces.append(detokenizer.feed())
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(text: str) -> None:
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


@settings(deadline=None, database=None)
@given(st.lists(st.integers(0, 257), max_size=30))
def test_byte_fallback_vocabularies_never_fail(ids: list[int]) -> None:
    # Here a bad byte changes how the bytes before it decode; what was shown stays.
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = Tokenizer(backend)
    text = "".join(stream(tokenizer, ids))
    assert len(text) == len(tokenizer.decode(ids))


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: read characters one by one until some stop string is complete."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None, database=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=10),
)
def test_stops_do_not_depend_on_borders(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    finder = StopFinder(stops)
    shown = ""
    found = None
    for start, end in itertools.pairwise(borders):
        piece, found = finder.feed(text[start:end])
        shown += piece
        if found:
            break
    assert (shown + finder.finish(), found) == first_stop(text, stops)


def test_only_a_possible_beginning_is_held_back() -> None:
    finder = StopFinder(["\n\nUser:"])
    assert finder.feed("text\n") == ("text", None)
    assert finder.feed("more\n\nUs") == ("\nmore", None)
    assert finder.feed("ual") == ("\n\nUsual", None)
    assert finder.feed("\n\nUser: hi") == ("", "\n\nUser:")
