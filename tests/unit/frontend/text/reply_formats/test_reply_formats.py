"""Tool calls and reasoning of every family: the same result wherever the text is cut.

The outputs are written in the shapes of the models' templates. Each is parsed as a whole, cut in two at every
place, character by character, and by the tokens of a tokenizer.
"""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.text.detokenizer import Detokenizer
from frontend.text.reply_formats.base import ReplyDelta, ReplyOptions, merge_calls
from frontend.text.reply_formats.choose import REASONING, TOOL_CALLS, TextFormat
from frontend.text.reply_formats.text import MAX_HELD
from tests.helpers import tiny_tokenizer
from tests.helpers.tool_calls import (
    CALL,
    END,
    K_CALL,
    K_CALL_END,
    K_END,
    K_SECTION,
    K_SEP,
    SECTION,
    SECTION_END,
    SEP,
    UNUSUAL,
    J,
)

TOKENIZER = tiny_tokenizer.tokenizer()
PLAIN = tiny_tokenizer.build()

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "object"},
    "list": {"type": "array"},
    "yes": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "code": {"type": "string"},
}
TOOLS: dict[str, dict[str, Any]] = {
    name: {"type": "object", "properties": PROPERTIES} for name in ("get_weather", "run", "f")
}
LONGEST_MARKER = 30  # a marker that is cut off is text
Call = tuple[str, dict[str, Any]]
Result = tuple[str, str, list[tuple[str, str]]]


class Shape(NamedTuple):
    """A reply: text before its calls, the calls."""

    text: str
    calls: list[Call]


SHAPES: dict[str, Shape] = {
    "no call": Shape("It is sunny, < 20 degrees.", []),
    "one": Shape("", [("get_weather", {"city": "Paris"})]),
    "text first": Shape("Let me look.", [("get_weather", {"city": "Paris", "days": 3})]),
    "no arguments": Shape("", [("run", {})]),
    "two": Shape("", [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]),
    "three": Shape("Now:", [("f", {"days": 1}), ("run", {"code": "x"}), ("f", {"days": -2})]),
    "unicode": Shape("好的 🦊", [("get_weather", {"city": "北京 🦊 é"})]),
    "lines": Shape("", [("run", {"code": "def f():\n    return {'a': [1, 2]}\n"})]),
    "quotes": Shape("", [("run", {"code": 'print("a\\n\\t\\"b\\"")'})]),
    "braces": Shape("", [("run", {"code": "{{}]}{"})]),
    "deep": Shape("", [("f", {"deep": {"a": {"b": [{"c": None}, {"d": "}"}]}}, "list": [1, [2, "]"]]})]),
    "types": Shape("", [("f", {"days": 0, "ratio": -1.5e3, "yes": True, "maybe": None, "city": ""})]),
    "number in a string": Shape("", [("get_weather", {"city": "75001", "days": 12})]),
    "markup": Shape("", [("run", {"code": "<b>1 < 2 && a</b> <tool> </parameter"})]),
    "long": Shape("", [("run", {"code": "word " * 60, "days": 7})]),
    "other name": Shape("I see <tool", [("get_weather", {"unknown": "x"})]),
}


def as_json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def hermes(shape: Shape) -> str:
    blocks = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(values)}}}\n</tool_call>'
        for name, values in shape.calls
    ]
    return shape.text + "\n".join(blocks)


def llama(shape: Shape) -> str:
    calls = [f'{{"name": "{name}", "parameters": {as_json(values)}}}' for name, values in shape.calls]
    return shape.text + ("<|python_tag|>" if calls else "") + "; ".join(calls)


def deepseek_v31(shape: Shape) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(values)}<｜tool▁call▁end｜>"
        for name, values in shape.calls
    ]
    inner = "".join(calls)
    return shape.text + (f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else "")


def deepseek_v3(shape: Shape) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(values)}\n```<｜tool▁call▁end｜>"
        for name, values in shape.calls
    ]
    inner = "\n".join(calls)
    return shape.text + (f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else "")


def kimi(shape: Shape) -> str:
    calls = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{as_json(values)}"
        "<|tool_call_end|>"
        for index, (name, values) in enumerate(shape.calls)
    ]
    inner = "".join(calls)
    return shape.text + (f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>" if calls else "")


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen3_coder(shape: Shape) -> str:
    blocks = []
    for name, values in shape.calls:
        inner = "".join(f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in values.items())
        blocks.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return shape.text + "\n".join(blocks)


def glm(shape: Shape, line: str = "\n") -> str:
    blocks = []
    for name, values in shape.calls:
        pairs = (
            f"<arg_key>{k}</arg_key>{line}<arg_value>{plain(v)}</arg_value>{line}" for k, v in values.items()
        )
        blocks.append(f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>")
    return shape.text + line.join(blocks)


WRITERS: dict[str, tuple[str, Callable[[Shape], str]]] = {
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v31", deepseek_v31),
    "kimi_k2": ("kimi_k2", kimi),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "glm45": ("glm45", glm),
    "glm47": ("glm47", lambda shape: glm(shape, "")),
}


def parse(
    family: str | None,
    pieces: Iterable[str],
    complete: bool = True,
    reasoning: str | None = None,
    **options: Any,
) -> Result:
    """(content, reasoning, calls) of a reply that arrives in `pieces`."""
    calls = None if family is None else TOOL_CALLS[family]
    think = None if reasoning is None else REASONING[reasoning]
    parser = TextFormat(calls, think, None).parser(ReplyOptions(**{"tools": TOOLS} | options))
    total = ReplyDelta()
    for delta in [*(parser.feed(0, piece) for piece in pieces), parser.finish("", complete)]:
        total.text += delta.text
        total.reasoning += delta.reasoning
        merge_calls(total.calls, delta.calls)
    assert parser.called == bool(total.calls)
    assert [call.index for call in total.calls] == list(range(len(total.calls)))
    assert len({call.id for call in total.calls}) == len(total.calls) and all(c.id for c in total.calls)
    return total.text, total.reasoning, [(call.name, call.arguments) for call in total.calls]


def tokens(text: str) -> list[str]:
    """What a detokenizer returns for each token."""
    detokenizer = Detokenizer(TOKENIZER)
    ids = PLAIN.encode(text, add_special_tokens=False).ids
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


def everywhere(family: str | None, text: str, **options: Any) -> Result:
    """The result, which is the same wherever `text` is cut."""
    whole = parse(family, [text], **options)
    assert parse(family, text, **options) == whole
    assert parse(family, tokens(text), **options) == whole
    for at in range(1, len(text)):
        assert parse(family, [text[:at], text[at:]], **options) == whole, text[:at]
    return whole


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("writer", WRITERS)
def test_calls_of_every_family(writer: str, shape: str) -> None:
    family, write = WRITERS[writer]
    content, _, calls = everywhere(family, write(SHAPES[shape]))
    assert content == SHAPES[shape].text
    assert [(name, json.loads(text)) for name, text in calls] == SHAPES[shape].calls


def without_sections(text: str) -> str:
    """The markers around all calls say nothing."""
    for marker in (SECTION, SECTION_END, K_SECTION, K_END):
        text = text.replace(marker, "")
    return text


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
            common = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(some, full, strict=False))
            )
            assert len(some) - common <= LONGEST_MARKER or some == "{}", text[:at]
        if not calls and at > len(content):
            assert cut_content.strip() == without_sections(text[:at]).strip()


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
]


@pytest.mark.parametrize(("reasoning", "thinking", "text", "content", "thought"), THINK)
@pytest.mark.parametrize("family", [None, "hermes"])
def test_reasoning(
    family: str | None, reasoning: str, thinking: bool, text: str, content: str, thought: str
) -> None:
    found = everywhere(family, text, reasoning=reasoning, thinking=thinking)
    assert found == (content, thought, [])


@pytest.mark.parametrize("writer", sorted(set(WRITERS) - {"llama3_json"}))
@pytest.mark.parametrize("closed", ["</think>\n\n", ""])
def test_a_call_ends_the_reasoning(writer: str, closed: str) -> None:
    family, write = WRITERS[writer]
    shape = Shape("", SHAPES["two"].calls)
    content, thought, calls = everywhere(
        family, f"look both up{closed}{write(shape)}", reasoning="qwen3", thinking=True
    )
    assert (content, thought, len(calls)) == ("", "look both up", 2)


FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "<function=",
            "</function>",
            "<parameter=days>",
            "\n",
        ),
        *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"),
        *(
            SECTION,
            SECTION_END,
            CALL,
            SEP,
            END,
            K_SECTION,
            K_END,
            K_CALL,
            K_SEP,
            K_CALL_END,
            "```json",
            "```",
        ),
        *("<|python_tag|>", "{", "}", "[", "]", '"', "\\", ";", ",", J, '{"name": "f", "arguments": ', "f"),
        *('"name"', ": ", "function", "functions.f:0", "text", "你", "🦊", "<", "</", "days", "1", " "),
    ]
)


@settings(deadline=None, max_examples=300)
@given(
    parts=st.lists(FRAGMENTS, max_size=16),
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
        kept, expected = without_sections(whole[0]), without_sections(text)
        assert "".join(kept.split()) == "".join(expected.split())


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
    ]:
        parser = TextFormat(TOOL_CALLS[family], None, None).parser(ReplyOptions(TOOLS))
        out = parser.feed(0, begin).characters
        for _ in range(2 * MAX_HELD // 100):
            out += parser.feed(0, "x" * 100).characters
        assert out > MAX_HELD - 1000, family


@pytest.mark.parametrize("writer", WRITERS)
def test_a_token_costs_the_same_at_the_end_of_long_arguments(writer: str) -> None:
    family, write = WRITERS[writer]
    text = write(Shape("", [("run", {"code": "some words " * 20_000})]))
    parser = TextFormat(TOOL_CALLS[family], None, None).parser(ReplyOptions(TOOLS))
    largest = max(len(parser._buffer) for at in range(0, len(text), 7) if parser.feed(0, text[at : at + 7]))  # type: ignore[attr-defined]
    assert largest < 2000
