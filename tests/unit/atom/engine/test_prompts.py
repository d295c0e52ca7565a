"""One prompt or conversation, or a list of them."""

from typing import Any

import pytest

from atom.engine.prompts import conversations_of, prompt_of, prompts_of

HELLO = {"role": "user", "content": "Hello!"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("one text", ["one text"]),
        ("", [""]),
        ([5, 6], [[5, 6]]),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["a", [7]], ["a", [7]]),
        ([], []),
    ],
)
def test_prompts(given: Any, wanted: Any) -> None:
    assert prompts_of(given) == wanted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt": "a"}, "prompts of type dict"),
        (7, "prompts of type int"),
        (b"text", "prompts of type bytes"),
        (["a", {"prompt": "b"}], "prompt 1 is neither"),
        ([[1, "a"]], "prompt 0 is neither"),
        ([True], "prompt 0 is neither"),
    ],
)
def test_other_prompts_are_refused(given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        prompts_of(given)


def test_one_prompt_is_not_a_list_of_them() -> None:
    assert prompt_of("a") == "a"
    assert prompt_of((5, 6)) == [5, 6]
    with pytest.raises(TypeError, match="the prompt is neither"):
        prompt_of(["a", "b"])


def test_conversations() -> None:
    assert conversations_of([HELLO]) == [[HELLO]]
    assert conversations_of([[HELLO], [HELLO, HELLO]]) == [[HELLO], [HELLO, HELLO]]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("Hello!", TypeError, "messages of type str"),
        (HELLO, TypeError, "messages of type dict"),
        (["Hello!"], TypeError, "a message of type str"),
        ([[HELLO], HELLO], TypeError, "a message of type list"),
        ([], ValueError, "no messages"),
        ([[HELLO], []], ValueError, "no messages"),
    ],
)
def test_other_conversations_are_refused(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        conversations_of(given)
