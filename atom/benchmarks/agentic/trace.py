"""Sessions as a file of JSON lines, one turn each.

    {"session": "a", "shared_tokens": 16000, "input_tokens": 420, "output_tokens": 317, "start_s": 0.0}
    {"session": "a", "input_tokens": 1200, "output_tokens": 95, "pause_s": 2.5}
    {"session": "b", "parent": "a", "parent_turns": 1, "input_tokens": 300, "output_tokens": 40}

The turns of a session are in their order. `shared_tokens`, `start_s`, `parent` and `parent_turns` belong to
its first turn. A fork comes after its parent. A trace has no texts: a run draws tokens of these lengths.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from atom.benchmarks.agentic.sessions import Session, Turn
from atom.benchmarks.serving.errors import BenchmarkError

__all__ = ["read_trace", "write_trace"]


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    session: Annotated[str, Meta(min_length=1, max_length=200)]
    input_tokens: Annotated[int, Meta(ge=1)]
    output_tokens: Annotated[int, Meta(ge=1)]
    pause_s: Annotated[float, Meta(ge=0)] = 0.0
    shared_tokens: Annotated[int, Meta(ge=0)] = 0
    start_s: Annotated[float, Meta(ge=0)] = 0.0
    parent: str | None = None
    parent_turns: Annotated[int, Meta(ge=0)] = 0


def write_trace(path: Path, sessions: Sequence[Session]) -> None:
    """Raises BenchmarkError if the file cannot be written."""
    encoder = msgspec.json.Encoder()
    try:
        with path.open("wb") as file:
            file.writelines(encoder.encode(line) + b"\n" for session in sessions for line in _lines(session))
    except OSError as error:
        raise BenchmarkError(f"cannot write the trace: {error}") from None


def read_trace(path: Path) -> list[Session]:
    """Raises BenchmarkError, which names the line, for a file that is no trace."""
    decoder = msgspec.json.Decoder(_Line)
    grouped: dict[str, list[_Line]] = {}
    try:
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise BenchmarkError(f"cannot read the trace: {error}") from None
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BenchmarkError(f"{path}, line {number}: {error}") from None
        grouped.setdefault(line.session, []).append(line)
    sessions = [_session(lines) for lines in grouped.values()]
    if not sessions:
        raise BenchmarkError(f"{path} has no turn")
    _check_parents(path, sessions)
    return sessions


def _lines(session: Session) -> Iterable[_Line]:
    for number, turn in enumerate(session.turns):
        line = _Line(session.name, turn.input_tokens, turn.output_tokens, turn.pause_s)
        if number == 0:
            line.shared_tokens = session.shared_tokens
            line.start_s = session.start_s
            line.parent = session.parent
            line.parent_turns = session.parent_turns
        yield line


def _session(lines: Sequence[_Line]) -> Session:
    first = lines[0]
    turns = [Turn(line.input_tokens, line.output_tokens, line.pause_s) for line in lines]
    return Session(first.session, turns, first.shared_tokens, first.parent, first.parent_turns, first.start_s)


def _check_parents(path: Path, sessions: Sequence[Session]) -> None:
    turns: dict[str, int] = {}
    for session in sessions:
        if session.parent is not None and session.parent_turns > turns.get(session.parent, -1):
            raise BenchmarkError(
                f"{path}: session {session.parent}, the parent of {session.name}, does not come before it or "
                f"has less than {session.parent_turns} turns"
            )
        turns[session.name] = len(session.turns)
