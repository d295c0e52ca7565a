"""Stop strings do not depend on token borders, and only a possible beginning is held back."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.text import stop_strings
from frontend.text.stop_strings import StopFinder


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


def test_the_work_for_stop_strings_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for many long ones that the text nearly contains, at every token."""
    asked: list[int] = []
    begins_one = stop_strings._StopStrings._begins_one
    monkeypatch.setattr(
        stop_strings._StopStrings,
        "_begins_one",
        lambda stops, text: asked.append(len(text)) or begins_one(stops, text),
    )
    stops = ["a" * (900 + number) + "b" for number in range(64)]
    for text in ("a" * 4000, ("a" * 950 + "c") * 4, "a" * 899 + "b" * 3 + "a" * 2000):
        asked.clear()
        finder = StopFinder(stops)
        shown = "".join(finder.feed(character)[0] for character in text) + finder.finish()
        assert shown == text
        assert len(asked) <= 2 * len(text)


def test_sequences_of_a_request_share_its_stop_strings() -> None:
    stops = ["one", "two"]
    assert StopFinder(stops)._stops is StopFinder(list(stops))._stops
