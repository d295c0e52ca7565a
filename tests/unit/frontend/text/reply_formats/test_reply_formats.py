"""Tool calls and reasoning of every family: the same result wherever the text is cut.

The outputs are written in the shapes of the models' templates. Each is parsed as a whole, cut in two at every
place, character by character, and by the tokens of a tokenizer.
"""

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.text.reply_formats.base import ReplyOptions
from frontend.text.reply_formats.choose import REASONING, TOOL_CALLS, TextFormat
from frontend.text.reply_formats.text import MAX_HELD
from tests.helpers.text.replies import (
    FRAGMENTS,
    SHAPES,
    TOOLS,
    WRITERS,
    Shape,
    everywhere,
    of_v4,
    parse,
    without_part,
)
from tests.helpers.text.tool_calls import (
    CALL,
    D_END,
    D_SECTION,
    K_CALL,
    K_END,
    K_SECTION,
    M_END,
    M_SECTION,
    SECTION,
    SECTION_END,
    SEP,
    UNUSUAL,
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("writer", WRITERS)
def test_calls_of_every_family(writer: str, shape: str) -> None:
    family, write = WRITERS[writer]
    content, _, calls = everywhere(family, write(SHAPES[shape]))
    assert content == SHAPES[shape].text
    assert [(name, json.loads(text)) for name, text in calls] == SHAPES[shape].calls


def without_sections(text: str) -> str:
    """The markers around all calls say nothing."""
    dsml = (f"\n\n{D_SECTION}\n", D_SECTION, D_END)
    for marker in (SECTION, SECTION_END, K_SECTION, K_END, M_SECTION, M_END, *dsml, *map(of_v4, dsml)):
        text = text.replace(marker, "")
    return text


def without_cut(text: str, family: str) -> str:
    """`text` without the part of a marker at its end, and without sections."""
    more = {
        "deepseek_v3": ("```json",),
        "deepseek_v32": ('">', f"\n\n{D_SECTION}\n"),
        "deepseek_v4": ('">', of_v4(f"\n\n{D_SECTION}\n")),
    }
    return without_sections(without_part(text, family, *more.get(family, ())))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("writer", WRITERS)
def test_calls_that_were_cut_off_are_not_lost(writer: str, shape: str) -> None:
    """What was generated is a beginning of the whole result, or content."""
    family, write = WRITERS[writer]
    text = write(SHAPES[shape])
    content, _, whole = parse(family, [text])
    for at in range(len(text)):
        cut_content, _, calls = parse(family, [text[:at]], complete=False)
        for (name, some), (full_name, full) in zip(calls, whole, strict=False):
            assert name == full_name
            # a value of unknown type is a string only once it has ended
            assert full.startswith(some) or full.replace('"x"', "x").startswith(some), text[:at]
        if calls:
            assert cut_content == content, text[:at]
        elif at > len(content):
            assert cut_content.strip() == without_cut(text[:at], family).strip()


@pytest.mark.parametrize("writer", WRITERS)
def test_without_tools_the_text_is_as_written(writer: str) -> None:
    family, write = WRITERS[writer]
    for shape in SHAPES.values():
        assert everywhere(family, write(shape), tools=None) == (write(shape), "", [])


@pytest.mark.parametrize("writer", WRITERS)
def test_only_the_first_call(writer: str) -> None:
    family, write = WRITERS[writer]
    text = write(SHAPES["three"])
    assert everywhere(family, text, parallel=False) == ("Now:", "", [("f", '{"days": 1}')])


@pytest.mark.parametrize(("family", "text", "content", "calls"), UNUSUAL)
def test_unusual_calls(family: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    if len(text) < 1000:
        assert everywhere(family, text) == (content, "", calls)
    assert parse(family, text) == (content, "", calls)


THINK: list[tuple[str, bool, str, str, str]] = [
    # parser, prompt ends inside of the reasoning, output, content, reasoning
    ("qwen3", False, "<think>\nwhy\n</think>\n\nso", "so", "why\n"),
    ("qwen3", False, "<think>\n\n</think>\n\nso", "so", ""),
    ("qwen3", False, "no thoughts", "no thoughts", ""),
    ("qwen3", False, "  <think>a</think>b", "b", "a"),
    ("qwen3", False, "I say <think> and </think>.", "I say <think> and </think>.", ""),
    ("qwen3", False, "<thin", "<thin", ""),
    ("qwen3", False, "</think>\n\nso", "so", ""),
    ("qwen3", True, "why</think>so", "so", "why"),
    ("qwen3", True, "<think>\nwhy</think>so", "so", "why"),
    ("qwen3", True, "why</think></think>\nso", "so", "why"),
    ("qwen3", True, "never ends </thin", "", "never ends </thin"),
    ("qwen3", True, "a </ b", "", "a </ b"),
    ("qwen3", True, "why</think>", "", "why"),
    ("deepseek_r1", False, "why</think>so", "so", "why"),
    ("deepseek_r1", False, "<think>why</think>so", "so", "why"),
    ("deepseek_r1", True, "why</think>\n\n so", " so", "why"),
    ("glm45", False, "\n<think>why</think>\nso", "so", "why"),
    ("kimi_k2", False, "<think>你好 🦊</think>好", "好", "你好 🦊"),
    ("mistral", False, "[THINK]why [1][/THINK]so", "so", "why [1]"),
    ("olmo3", True, "why</think>so", "so", "why"),
    ("granite", False, "Here is my thought process:\n\nwhy\n\nHere is my response:\n\nso", "so", "why\n\n"),
    ("granite", False, "Here is my answer.", "Here is my answer.", ""),
    ("granite_tags", True, "why</think><response>so</response>", "so", "why"),
    ("granite_tags", False, "<think>why</think>\n<response>\nso\n</response>", "so\n", "why"),
    ("granite_tags", False, "<think>why</think>so </response>", "so </response>", "why"),
    ("granite_tags", False, "<response>so</response>", "<response>so</response>", ""),
    ("granite_tags", False, "<think>why</think><respon", "<respon", "why"),
]


@pytest.mark.parametrize(("reasoning", "thinking", "text", "content", "thought"), THINK)
@pytest.mark.parametrize("family", [None, "hermes"])
def test_reasoning(
    family: str | None, reasoning: str, thinking: bool, text: str, content: str, thought: str
) -> None:
    found = everywhere(family, text, reasoning=reasoning, thinking=thinking)
    assert found == (content, thought, [])


@settings(deadline=None, max_examples=300)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=16),
    cuts=st.lists(st.integers(0, 200), max_size=10),
    family=st.sampled_from([None, *sorted(TOOL_CALLS)]),
    reasoning=st.sampled_from([None, *sorted(REASONING)]),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_cuts_make_no_difference_to_any_text(
    parts: list[str], cuts: list[int], family: str | None, reasoning: str | None, flags: tuple[bool, bool]
) -> None:
    text, (thinking, complete) = "".join(parts), flags
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    options: dict[str, Any] = {"reasoning": reasoning, "thinking": thinking, "complete": complete}
    whole = parse(family, [text], **options)
    assert parse(family, pieces, **options) == whole
    assert parse(family, text, **options) == whole
    if not whole[2] and reasoning is None and family is not None and not complete:
        kept = "".join(without_sections(whole[0]).split())
        openers = TOOL_CALLS[family].OPENERS  # outside a call, no other marker is expected
        possible = (without_cut(text, family), without_sections(without_part(text, family, markers=openers)))
        assert kept in ["".join(expected.split()) for expected in possible]


def test_what_is_held_back_is_bounded() -> None:
    """Values that are parsed as a whole, and headers, become text once they are too long."""
    for family, begin in [
        ("hermes", '<tool_call>{"arguments": {"a": "'),
        ("llama3_json", '{"parameters": {"a": "'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=deep>\n"),
        ("glm45", "<tool_call>f\n<arg_key>deep</arg_key>\n<arg_value>"),
        ("hermes", "<tool_call>"),
        ("qwen3_coder", "<function="),
        ("glm45", "<tool_call>"),
        ("kimi_k2", K_CALL),
        ("deepseek_v3", f"{CALL}function{SEP}"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]"),
        ("mistral", '[TOOL_CALLS][{"arguments": {"a": "'),
        ("granite", "<|tool_call|>[" + " " * 2000),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}, "label": "'),
        ("olmo3", "<function_calls>f(deep=["),
        ("olmo3", "<function_calls>"),
        ("olmo3", "<function_calls>f("),
        ("pythonic", "[f(deep=["),
        ("pythonic", "[f(deep=('"),
        ("pythonic", "[f("),
        ("pythonic", "[" + " " * 2000),
        ("llama4_pythonic", "<|python_start|>["),
    ]:
        parser = TextFormat(TOOL_CALLS[family], None, None).parser(ReplyOptions(TOOLS))
        out = parser.feed(0, begin).characters
        for _ in range(2 * MAX_HELD // 100):
            out += parser.feed(0, "x" * 100).characters
        assert out > MAX_HELD - 1000, family


@pytest.mark.parametrize(
    "value", ["['" + "\\'" * 30_000, "[" * 60_000, "[" + "(),'\"'," * 9_000, "{'a':" * 10_000]
)
def test_values_in_python_take_linear_time(value: str) -> None:
    """The longest that is held takes some 40 ms; what would search for an end again and again, a minute."""
    begun = time.process_time()
    _, _, calls = parse("pythonic", [f"[f(deep={value}"])
    assert time.process_time() - begun < 2
    assert calls == [("f", json.dumps({"deep": value}))]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_token_costs_the_same_at_the_end_of_long_arguments(writer: str) -> None:
    family, write = WRITERS[writer]
    text = write(Shape("", [("run", {"code": "some words " * 20_000})]))
    parser = TextFormat(TOOL_CALLS[family], None, None).parser(ReplyOptions(TOOLS))
    largest = max(len(parser._buffer) for at in range(0, len(text), 7) if parser.feed(0, text[at : at + 7]))  # type: ignore[attr-defined]
    assert largest < 2000
