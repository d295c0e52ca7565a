"""Server-sent events from chunks of any size."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.benchmarks.serving.sse import EventSplitter

WORDS = st.binary(max_size=12).map(lambda data: data.replace(b"\r", b"").replace(b"\n", b""))
EVENTS = st.lists(st.lists(WORDS, min_size=1, max_size=3), max_size=6)


def read(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [event for piece in pieces for event in splitter.feed(piece)] + splitter.end()


@given(
    events=EVENTS,
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    space=st.booleans(),
    noise=st.sampled_from([b"", b": a comment", b"id: 7", b"event: token"]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_cuts_and_line_ends_change_nothing(
    events: list[list[bytes]], line_end: bytes, space: bool, noise: bytes, cuts: list[int]
) -> None:
    start = b"data: " if space else b"data:"
    stream = b""
    for lines in events:
        # Without the space that is taken off, a line must not begin with one.
        lines[:] = [line if space else line.lstrip(b" ") for line in lines]
        stream += noise + line_end if noise else b""
        stream += b"".join(start + line + line_end for line in lines) + line_end
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[begin:end] for begin, end in itertools.pairwise(edges)]
    assert read(pieces) == [b"\n".join(lines) for lines in events]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\n\ndata: b", [b"a", b"b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\n", [b""]),
        (b": ping\n\n", []),
        (b"", []),
    ],
)
def test_streams(stream: bytes, events: list[bytes]) -> None:
    assert read([stream]) == events
    assert read([stream[i : i + 1] for i in range(len(stream))]) == events


def test_an_event_is_returned_once_it_is_complete() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"\ndata: b\n\nda") == [b"a", b"b"]
    assert splitter.feed(b"ta: c\n\n") == [b"c"]
