"""Expressions restricted by others."""

import itertools
import random
import re

import pytest

from workers.grammar.automata import restricted
from workers.grammar.expressions import ANYTHING, Chars, Choice, PatternError, Repeat, parsed
from workers.grammar.patterns import spelled

PARTS = ("a", "b", "[ab]", "[^a]", "a*", "b+", "(?:ab|b)", "(?:a|bb){1,2}", "(?:ab?)*", "", "c?")
TEXTS = ["".join(each) for length in range(6) for each in itertools.product("abc", repeat=length)]


def _random_expression(draw: random.Random) -> str:
    return "|".join("".join(draw.choices(PARTS, k=draw.randrange(1, 4))) for _ in range(draw.randrange(1, 3)))


@pytest.mark.parametrize("is_excluded", [False, True])
def test_what_matches_both_or_the_first_alone(is_excluded: bool) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        first = _random_expression(draw)
        second = _random_expression(draw)
        made = restricted(parsed(first, True), parsed(second, True), is_excluded)
        spelling = spelled(made, ANYTHING)
        for text in TEXTS:
            is_right = bool(re.fullmatch(first, text)) and bool(re.fullmatch(second, text)) != is_excluded
            found = spelling is not None and re.fullmatch(spelling, text) is not None
            assert found == is_right, (first, second, text)
        assert (spelling is None) == (made == Choice(())), (first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [("(?:a|b)*a(?:a|b){12}", "a*"), ("(?:(?:a{90}){90}){90}", "a*"), ("[ab]*", ".*a.{6}")],
)
def test_the_work_is_bounded(first: str, second: str) -> None:
    with pytest.raises(PatternError, match="too large"):
        restricted(parsed(first, True), parsed(second, True), False)


def test_many_sets_of_characters_are_bounded() -> None:
    sets = "|".join(f"[{chr(0x4E00 + 2 * i)}-{chr(0x4E20 + 3 * i)}]" for i in range(2000))
    with pytest.raises(PatternError, match="too large"):
        restricted(parsed(sets, True), Repeat(Chars(ANYTHING), 0, 3), False)
