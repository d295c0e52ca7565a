"""Exceptions as one line of text."""

import pytest

from atom.utils.errors import one_line


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no\n  such file"), "no such file"),
        (
            UnicodeDecodeError("utf-8", b"", 0, 1, "bad"),
            "'utf-8' codec can't decode bytes in position 0-0: bad",
        ),
        (RuntimeError("out of\nluck"), "RuntimeError: out of luck"),
        (ValueError(), "ValueError"),
        (KeyError(), "KeyError"),
    ],
)
def test_message_and_type(error: Exception, text: str) -> None:
    assert one_line(error, ValueError, MemoryError) == text


def test_length_is_bounded() -> None:
    assert len(one_line(RuntimeError("x" * 10_000_000))) < 2100
