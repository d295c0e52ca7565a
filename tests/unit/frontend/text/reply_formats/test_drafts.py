"""Calls in the reasoning are calls only if the reply ends with them, wherever the text is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.text.reply_formats.choose import TOOL_CALLS
from tests.helpers.text.replies import FRAGMENTS, SHAPES, WRITERS, Shape, everywhere, parse, without_part
from tests.helpers.text.tool_calls import K_CALL, K_SECTION

# A call in the reasoning begins with a marker, which Llama's calls need not have.
FAMILIES = sorted(set(WRITERS) - {"llama3_json", "pythonic", "pythonic, json"})
DRAFT = Shape("", [("get_weather", {"city": "DRAFT"})])
REAL = Shape("", [("get_weather", {"city": "Paris"}), ("run", {"code": "x < 2"})])


def reply(family: str, text: str) -> tuple[str, str, list[tuple[str, object]]]:
    content, reasoning, calls = everywhere(family, text, reasoning="qwen3", thinking=True)
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("writer", FAMILIES)
@pytest.mark.parametrize("closed", ["</think>\n\n", ""])
def test_a_reply_may_end_with_calls_in_its_reasoning(writer: str, closed: str) -> None:
    family, write = WRITERS[writer]
    assert reply(family, f"look both up{closed}{write(REAL)}") == ("", "look both up", REAL.calls)


@pytest.mark.parametrize("writer", FAMILIES)
@pytest.mark.parametrize("closed", ["</think>\n\n", ""])
def test_a_thought_that_goes_on_after_a_call(writer: str, closed: str) -> None:
    family, write = WRITERS[writer]
    thought = f"I could write {write(DRAFT)} but first think.\n"
    assert reply(family, f"{thought}{closed}{write(REAL)}") == ("", thought, REAL.calls)


@pytest.mark.parametrize("writer", FAMILIES)
def test_a_closing_marker_after_a_call(writer: str) -> None:
    family, write = WRITERS[writer]
    for white in ("", "\n"):
        thought = f"I could write {write(DRAFT)}{white}"
        assert reply(family, f"{thought}</think>\n\nParis is sunny.") == ("Paris is sunny.", thought, [])
        assert reply(family, f"{thought}</think>{write(REAL)}") == ("", thought, REAL.calls)


@pytest.mark.parametrize("family", sorted(TOOL_CALLS))
def test_markers_may_be_mentioned(family: str) -> None:
    for marker in TOOL_CALLS[family].MARKERS:
        thought = f"Some models use {marker} tags, {marker} I need not.\n"
        assert reply(family, f"<think>\n{thought}</think>\n\nParis is sunny.") == (
            "Paris is sunny.",
            thought,
            [],
        )
        assert reply(family, thought) == ("", thought, [])


@pytest.mark.parametrize("writer", FAMILIES)
def test_a_call_that_breaks_off_is_reasoning(writer: str) -> None:
    family, write = WRITERS[writer]
    text = write(Shape("", REAL.calls[:1]))
    for at in range(1, len(text)):
        content, reasoning, calls = parse(family, [f"look: {text[:at]}"], reasoning="qwen3", thinking=True)
        assert content == "" and (calls or reasoning == f"look: {text[:at]}")
        closed = f"look: {text[:at]}</think>so"
        assert parse(family, [closed], reasoning="qwen3", thinking=True) == ("so", f"look: {text[:at]}", [])


@pytest.mark.parametrize("writer", FAMILIES)
@pytest.mark.parametrize("shape", ["text first", "three", "markup"])
def test_replies_that_are_cut_off_show_no_part_of_a_marker(writer: str, shape: str) -> None:
    """Nothing but that part is lost, and calls in an open thought are no calls."""
    family, write = WRITERS[writer]
    thought = f"I could write {write(DRAFT)} but first think."
    text = f"<think>\n{thought}</think>\n\n{write(SHAPES[shape])}"
    options = {"reasoning": "qwen3", "complete": False}
    whole_content, whole_thought, whole = parse(family, [text], **options)
    assert whole_thought == thought
    for at in range(len(text)):
        content, reasoning, calls = parse(family, [text[:at]], **options)
        assert (content, reasoning, calls) == parse(family, text[:at], **options), text[:at]
        end = text.index("</think>")
        if at <= end + len("</think>") - 1:
            expected = without_part(text[:at], family, "<think>", "</think>")
            assert (content, calls) == ("", [])
            assert reasoning == expected.removeprefix("<think>").lstrip("\n")
        else:
            assert reasoning == thought
        assert all(full[1].startswith(some[1]) for some, full in zip(calls, whole, strict=False))
        if calls:
            assert content == whole_content


def test_reasoning_is_not_held_for_longer_than_needed() -> None:
    """Mentions of a marker hold back what may belong to a call, not the rest."""
    for family, mention in (
        ("hermes", "<tool_call>"),
        ("glm45", "<tool_call>"),
        ("kimi_k2", K_SECTION + K_CALL),
    ):
        pieces = ["So I write ", mention, " here. ", *["And so on.\n"] * 200]
        content, reasoning, _ = parse(family, pieces, complete=False, reasoning="qwen3", thinking=True)
        assert (content, reasoning) == ("", "".join(pieces))


THOUGHTS = st.lists(
    st.sampled_from(
        [
            *(each for each in FRAGMENTS if "think" not in each),
            *(write(shape) for _, write in WRITERS.values() for shape in (DRAFT, REAL)),
        ]
    ),
    max_size=8,
).map("".join)


@settings(deadline=None, max_examples=300)
@given(thought=THOUGHTS, family=st.sampled_from(sorted(TOOL_CALLS)), in_characters=st.booleans())
def test_nothing_in_a_closed_thought_is_a_reply(thought: str, family: str, in_characters: bool) -> None:
    text = f"why: {thought}</think>so"
    pieces = [*text] if in_characters else [text]
    assert parse(family, pieces, reasoning="qwen3", thinking=True) == ("so", f"why: {thought}", [])


@settings(deadline=None, max_examples=300)
@given(thought=THOUGHTS, family=st.sampled_from(sorted(TOOL_CALLS)), in_characters=st.booleans())
def test_nothing_in_a_thought_that_is_cut_off_is_a_reply(
    thought: str, family: str, in_characters: bool
) -> None:
    text = f"why: {thought}"
    pieces = [*text] if in_characters else [text]
    content, reasoning, calls = parse(family, pieces, complete=False, reasoning="qwen3", thinking=True)
    assert (content, calls) == ("", [])
    assert reasoning == without_part(text, family, "</think>")
