"""Sessions written to a file and read back; every fault names its line."""

from pathlib import Path

import pytest

from atom.benchmarks.agentic.sessions import SessionModel, make_sessions
from atom.benchmarks.agentic.trace import read_trace, write_trace
from atom.benchmarks.serving.errors import BenchmarkError


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    sessions = make_sessions(SessionModel(fork_probability=0.3, session_rate=1.0), 6, 3)
    path = tmp_path / "trace.jsonl"
    write_trace(path, sessions)
    assert read_trace(path) == sessions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no turn"),
        ('{"session": "a", "input_tokens": 1, "output_tokens": 1}\nx', "line 2"),
        ('{"session": "a", "input_tokens": 0, "output_tokens": 1}', "line 1.*input_tokens"),
        ('{"session": "a", "input_tokens": 1, "output_tokens": 1, "text": ""}', "line 1.*text"),
        ('{"session": "b", "input_tokens": 1, "output_tokens": 1, "parent": "a"}', "parent of b"),
        (
            '{"session": "a", "input_tokens": 1, "output_tokens": 1}\n'
            '{"session": "b", "input_tokens": 1, "output_tokens": 1, "parent": "a", "parent_turns": 2}',
            "less than 2 turns",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match=message):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="cannot read the trace"):
        read_trace(tmp_path / "none")
    with pytest.raises(BenchmarkError, match="cannot write the trace"):
        write_trace(tmp_path / "none" / "trace", [])
