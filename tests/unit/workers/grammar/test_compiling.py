"""Compiled sources: what is accepted, and what a client is told."""

import json
import random
import string
from typing import Any, cast

import numpy as np
import pytest
import xgrammar

from atom.shared.messages.codec import encode
from atom.shared.messages.grammar import MAX_SOURCE_BYTES, CompiledGrammar, GrammarSource
from tests.helpers.text.byte_grammars import accepts, byte_compiler, compile_bytes
from workers.grammar.compiling import compile_source, compiled
from workers.grammar.structural_tags import MAX_WHITESPACE

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def _compiled(kind: str, content: Any) -> CompiledGrammar:
    text = content if isinstance(content, str) else json.dumps(content)
    return compiled(GrammarSource(kind, text), byte_compiler())


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("json_schema", PERSON),
        ("json_object", ""),
        (
            "structural_tag",
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": PERSON}},
        ),
    ],
)
def test_white_space_is_bounded(kind: str, content: Any) -> None:
    grammar = compile_bytes(kind, content if isinstance(content, str) else json.dumps(content))
    text = '{|"name"|:|"x"|,|"age"|:|3|}'
    assert accepts(grammar, text.replace("|", " " * MAX_WHITESPACE))
    for index in range(text.count("|")):
        parts = text.split("|")
        long = "".join(parts[: index + 1]) + " " * (MAX_WHITESPACE + 1) + "".join(parts[index + 1 :])
        assert not accepts(grammar, long), long


def _bounded(words: list[str], **limits: int) -> tuple[GrammarSource, xgrammar.GrammarCompiler]:
    """A schema of strings, and a compiler for a vocabulary of `words`, a quote and an end."""
    vocabulary = [*(word.encode() for word in words), b'"', b""]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[len(words) + 1])
    source = GrammarSource("json_schema", json.dumps({"type": "string", **limits}))
    return source, xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def test_strings_with_long_bounds_are_small_grammars() -> None:
    """A fraction of what one repetition of 5,000 takes."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=1 + n % 12)) for n in range(10_000)]
    made = compiled(*_bounded(words, maxLength=5000))
    assert not made.error and made.memory < 2_500_000


def test_a_hundred_tools() -> None:
    """xgrammar itself would write far more of the compiled grammar than of its source."""
    _, compiler = _bounded([*string.printable, "path", "lines"])
    tags = [
        {
            "begin": f'<call>{{"name": "tool_{number}", "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}, f"own_{number}": {"enum": ["a", "b"]}},
                    "required": ["path"],
                },
            },
            "end": "}</call>",
        }
        for number in range(100)
    ]
    form = {"type": "triggered_tags", "triggers": ["<call>"], "tags": tags}
    source = GrammarSource("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    made = compiled(source, compiler)
    assert not made.error and made.source == encode(source)


def test_a_text_that_is_too_large_is_not_compiled() -> None:
    source = GrammarSource("regex", "a" * (MAX_SOURCE_BYTES + 1))
    assert (
        "its text takes 8.0 MiB, at most 8" in compiled(source, cast("xgrammar.GrammarCompiler", None)).error
    )


@pytest.mark.parametrize(
    "limits",
    [{"maxLength": 128}, {"maxLength": 400}, {"minLength": 300}, {"minLength": 200, "maxLength": 400}],
)
def test_masks_within_long_bounds(limits: dict[str, int]) -> None:
    """A token is allowed if all of it fits, not its beginning alone."""
    words = ["a", "ab", "abc", " \n", "a\\", 'a"', 'a"b', '"b', "é", "\n"]
    grammar, _ = compile_source(*_bounded(words, **limits))
    low, high = limits.get("minLength", 0), limits.get("maxLength", 1000)
    words_1W = np.zeros((1, 1), np.int32)
    for length in range(min(high, 500) + 1):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert matcher.accept_string('"' + "x" * length)
        matcher.fill_next_token_bitmask(words_1W, 0)
        expected = [word for word in ("a", "ab", "abc", "é") if length + len(word) <= high]
        expected += ['a"'] * (low <= length + 1 <= high) + ['"'] * (low <= length)
        allowed = [word for bit, word in enumerate([*words, '"']) if words_1W[0, 0] >> bit & 1]
        assert sorted(allowed) == sorted(expected), length


def test_white_space_may_be_fixed() -> None:
    grammar, _ = compile_source(GrammarSource("json_schema", json.dumps(PERSON), False), byte_compiler())
    assert accepts(grammar, '{"name": "x", "age": 3}')
    assert not accepts(grammar, '{"name":  "x", "age": 3}')


@pytest.mark.parametrize(
    ("kind", "content", "reason"),
    [
        (
            "json_schema",
            {"properties": {"a": {"anyOf": []}}},
            "no value fits an empty 'anyOf', at #/properties/a",
        ),
        ("json_schema", '{"minimum": NaN}', "not valid JSON"),
        ("json_schema", '{"const": "\\ud800"}', "surrogate"),
        ("regex", "a(?<=b)", "a lookbehind '(?<='"),
        ("structural_tag", "[", "not valid JSON"),
    ],
)
def test_errors_say_what_is_wrong_and_where(kind: str, content: Any, reason: str) -> None:
    assert reason in _compiled(kind, content).error


@pytest.mark.parametrize("text", ['start: "yes" | "no"', 'yes ::= "yes"'])
def test_a_grammar_of_another_form_is_told_the_form(text: str) -> None:
    error = _compiled("grammar", text).error
    assert 'root ::= "yes"' in error and "Lark" in error and "\n" not in error


def _calls(*tools: tuple[Any, bool]) -> dict[str, Any]:
    parts = [
        {"type": "json_schema", "json_schema": schema, "tool": f"tool{index}", "lenient": is_lenient}
        for index, (schema, is_lenient) in enumerate(tools)
    ]
    return {"type": "structural_tag", "format": {"type": "or", "elements": parts}}


AWKWARD: list[dict[str, Any]] = [
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}}},
    {"type": "object", "properties": {"n": {"type": "array", "items": [{"type": "integer"}]}}},
    {"type": "object", "properties": {"n": {"type": "string", "pattern": "^\\p{L}+$"}}},
    {"type": "object", "properties": {"n": {"$ref": "#/properties/n"}}, "required": ["n"]},
]


@pytest.mark.parametrize("schema", AWKWARD, ids=str)
def test_one_awkward_tool_fails_no_other(schema: dict[str, Any]) -> None:
    tag = _calls((PERSON, True), (schema, True))
    found = _compiled("tool_calls", tag)
    assert found.error == ""
    (warning,) = found.warnings
    assert "'tool1'" in warning and "at #/properties/n" in warning
    grammar = compile_bytes("tool_calls", json.dumps(tag))
    assert accepts(grammar, '{"name": "x", "age": 3}') and accepts(grammar, '{"what": [1]}')
    strict = _compiled("tool_calls", _calls((PERSON, True), (schema, False)))
    assert "the tool 'tool1'" in strict.error and "at #/properties/n" in strict.error


def test_a_tool_with_bare_counts_is_enforced() -> None:
    counts = {"type": "object", "properties": {"n": {"type": "array", "minItems": 1}}, "required": ["n"]}
    tag = _calls((counts, True))
    assert _compiled("tool_calls", tag).warnings == []
    grammar = compile_bytes("tool_calls", json.dumps(tag))
    assert accepts(grammar, '{"n": [3]}') and not accepts(grammar, '{"n": []}')
