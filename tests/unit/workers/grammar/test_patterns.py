"""Regular expressions for xgrammar: patterns are found anywhere, and expressions match a whole text."""

import json
import random
import re

import pytest
import xgrammar

from tests.helpers.text.byte_grammars import accepts, byte_compiler, compile_bytes
from workers.grammar.expressions import ANYTHING, PatternError
from workers.grammar.patterns import PLAIN, all_but, found_anywhere, full_match, spelled

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
FOUND = [
    ("^https?://", ["https://a/b", "http://"], ["ftp://", "a https://"]),
    ("a", ["a", "bab"], ["", "b"]),
    ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
    ("(?:^|,)x(?:,|$)", ["x", "a,x", "x,a", "a,x,b"], ["ax", "xb"]),
    ("(?:^a)?b", ["ab", "b", "xb"], ["a"]),
    ("^$", [""], ["a"]),
    ("", ["", "a"], []),
    ("\\Aab\\Z", ["ab"], ["xab", "abx", "AabZ"]),
    ("^[^\\s\\d]+$", ["ab"], ["a b", "a1"]),
    ("^\\u{1F600}\\ud83d\\ude01$", ["\U0001f600\U0001f601"], ["a"]),
    ("^[^]$", ["a", "é"], ["", "ab"]),
    ("^a{2$", ["a{2"], ["aa"]),
    ("^(?<n>a)(?P<m>b)??$", ["a", "ab"], ["b"]),
    ("^(?!.*b)[ab]{6}$", ["aaaaaa"], ["bbbbbb", "aaabaa", "aaaaa"]),
    ("foo(?!bar)", ["foo", "xfoobarfoo"], ["foobar"]),
    ("^(?=a|b$)..?$", ["a", "ab", "b"], ["bc"]),
    ("^(?:(?!ab)[a-z]+|X)$", ["abx"[1:], "X"], ["abc"]),
    ("^[a-z](?!.*--)(?=.*x)[a-z-]*[a-z]$", ["a-x", "axb"], ["a--x", "ab"]),
    (EMAIL, ["a@b.de", "x'y+z@a-b.com"], [".a@b.de", "a..b@c.de", "a.@b.de", "ab"]),
]
REFUSED = [
    ("^(?:(?!b).)*a", "lookahead '(?!' cannot be enforced inside of a group"),
    ("(?=(?=a))b", "lookahead '(?=' cannot be enforced inside of a group"),
    (
        "^(?=.*\\d)(?=.*[a-z])(?=.*[A-Z])(?=.*-).{40,}$",
        "lookahead '(?=' cannot be enforced here: the expression is too large",
    ),
    ("(?<=a)b", "lookbehind '(?<='"),
    ("(?<!a)b", "lookbehind '(?<!'"),
    ("(a)\\1", "backreference '\\1'"),
    ("(?P<a>b)(?P=a)", "backreference '(?P='"),
    ("(?<a>b)\\k<a>", "backreference '\\k'"),
    ("^\\p{L}+$", "Unicode property '\\p'"),
    ("\\bword", "word boundary '\\b'"),
    ("\\z", "escape sequence '\\z'"),
    ("(?i)a", "flags"),
    ("(?>a)", "atomic group"),
    ("a++", "possessive"),
    ("a^b", "'^' with something before the beginning"),
    ("a$b", "'$' with something after the end"),
    ("(?:^a)+", "'^' with something before the beginning"),
    ("^*", "assertion"),
    ("a**", "nothing to repeat"),
    ("a{3,1}", "bounds"),
    ("(a", "not closed"),
    ("a)", "closes no group"),
    ("[a", "not closed"),
    ("[b-a]", "wrong end"),
]


def _pattern(text: str) -> xgrammar.CompiledGrammar:
    schema = {"type": "string", "pattern": spelled(found_anywhere(text), PLAIN)}
    return byte_compiler().compile_json_schema(json.dumps(schema))


@pytest.mark.parametrize(("text", "valid", "others"), FOUND, ids=str)
def test_a_pattern_is_found_anywhere(text: str, valid: list[str], others: list[str]) -> None:
    grammar = _pattern(text)
    for value in valid + others:
        assert accepts(grammar, json.dumps(value, ensure_ascii=False)) == (value in valid), value


@pytest.mark.parametrize(("text", "name"), REFUSED, ids=str)
def test_what_cannot_be_enforced_is_named(text: str, name: str) -> None:
    for read in (found_anywhere, full_match):
        with pytest.raises(PatternError, match=re.escape(name)) as caught:
            read(text)
        assert "position" in str(caught.value)


def test_the_syntax_is_that_of_ecmascript_or_of_python() -> None:
    assert spelled(found_anywhere("^[]$"), ANYTHING) is None
    assert re.fullmatch(full_match("[]]"), "]")
    assert re.fullmatch(full_match("a{,2}"), "")
    with pytest.raises(PatternError, match="write {0,"):
        found_anywhere("a{,2}")
    for text in ("\\x41", "\\u0041", "\\U00000041"):
        assert re.fullmatch(full_match(text), "A")


@pytest.mark.parametrize(
    ("text", "valid", "others"),
    [
        ("\\Aab\\Z", ["ab"], ["AabZ"]),
        ("a.b", ["axb", "a\rb"], ["a\nb"]),
        ("^a|b$", ["a", "b"], ["ax"]),
        ("\\s\\d\\w", [" 1_", "\n2a"], ["\u00a01a"]),
        ("(?:a|)", ["", "a"], ["b"]),
    ],
)
def test_an_expression_matches_a_whole_text(text: str, valid: list[str], others: list[str]) -> None:
    grammar = compile_bytes("regex", text)
    for value in valid + others:
        assert accepts(grammar, value) == (value in valid), value


def test_an_expression_that_nothing_matches_is_refused() -> None:
    with pytest.raises(PatternError, match="no text matches"):
        full_match("[^\\s\\S]")


@pytest.mark.parametrize("high", [127, 128, 129, 190, 191, 192, 1000, None])
@pytest.mark.parametrize("low", [0, 1, 63, 127, 128, 900])
def test_long_repetitions_have_the_same_lengths(low: int, high: int | None) -> None:
    if high is not None and low > high:
        return
    text = full_match(f"[a-c]{{{low},{'' if high is None else high}}}")
    for count in range(1100):
        assert bool(re.fullmatch(text, "b" * count)) == (low <= count and (high is None or count <= high))


def test_all_but_some_texts() -> None:
    spelling = spelled(all_but(["a", "ab", "é", ""]), ANYTHING)
    assert spelling is not None
    for text in ("a", "ab", "é", ""):
        assert re.fullmatch(spelling, text) is None
    for text in ("b", "abc", "aa", "ée", "\n"):
        assert re.fullmatch(spelling, text)


def _random_expression(draw: random.Random, depth: int) -> str:
    kind = draw.random()
    if depth == 0 or kind < 0.35:
        return draw.choice(
            ["a", "b", ".", "[ab]", "[^a]", "\\d", "\\w", "\\s", "[a-c0]", "\\.", "\\-", "é", "[\\s\\S]", "]"]
        )
    if kind < 0.6:
        return "".join(_random_expression(draw, depth - 1) for _ in range(draw.randrange(4)))
    if kind < 0.75:
        options = [_random_expression(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
        return f"({draw.choice(['', '?:'])}{'|'.join(options)})"
    inner = _random_expression(draw, depth - 1)
    if kind < 0.9:
        return f"(?:{inner}){draw.choice(['*', '+', '?', '{2}', '{1,}', '{0,2}', '*?'])}"
    return f"^{inner}" if kind < 0.95 else f"{inner}$"


def test_random_expressions_match_what_python_matches() -> None:
    compared = 0
    for seed in range(300):
        draw = random.Random(seed)
        text = _random_expression(draw, 3)
        texts = {"".join(draw.choices("ab01.-é ]\t", k=draw.randrange(6))) for _ in range(12)}
        python = re.compile(text, re.ASCII)
        try:
            pattern = _pattern(text)
            whole = compile_bytes("regex", text)
        except PatternError as error:
            assert "with something" in str(error), text  # an anchor in the middle
            continue
        for value in texts:
            assert accepts(whole, value) == bool(python.fullmatch(value)), (text, value)
            if "\t" not in value:
                found = accepts(pattern, json.dumps(value, ensure_ascii=False))
                assert found == bool(python.search(value)), (text, value)
            compared += 1
    assert compared > 2000
