"""Drawn sessions: reproducible, within their contexts, forks after their parents."""

import dataclasses
from collections.abc import Sequence

import pytest

from atom.benchmarks.agentic.sessions import LogNormal, SessionModel, Turn, make_sessions

MODEL = SessionModel(shared_tokens=1000, max_context=30_000, fork_probability=0.2)


def num_tokens(turns: Sequence[Turn]) -> int:
    return sum(turn.input_tokens + turn.output_tokens for turn in turns)


def test_the_same_seed_gives_the_same_sessions() -> None:
    assert make_sessions(MODEL, 5, 1) == make_sessions(MODEL, 5, 1)
    assert make_sessions(MODEL, 5, 1) != make_sessions(MODEL, 5, 2)


def test_contexts_are_not_exceeded_and_sessions_are_long() -> None:
    sessions = {session.name: session for session in make_sessions(MODEL, 40, 0)}
    lengths = []
    for session in sessions.values():
        context = session.shared_tokens + sum(
            turn.input_tokens + turn.output_tokens for turn in session.turns
        )
        if session.parent is not None:
            first = sessions[session.parent].turns[: session.parent_turns]
            assert len(first) == session.parent_turns > 0
            context += sum(turn.input_tokens + turn.output_tokens for turn in first)
        else:
            lengths.append(context)
        assert context <= MODEL.max_context
    assert len(sessions) > 40 == len(lengths)
    assert sum(lengths) / len(lengths) > MODEL.max_context / 2


def test_medians_are_those_of_the_model() -> None:
    turns = [turn for session in make_sessions(MODEL, 200, 0) for turn in session.turns]
    outputs = sorted(turn.output_tokens for turn in turns)
    assert outputs[len(outputs) // 2] == pytest.approx(MODEL.output.median, rel=0.15)


def test_sessions_start_at_their_rate() -> None:
    sessions = make_sessions(dataclasses.replace(MODEL, session_rate=2.0, fork_probability=0.0), 200, 0)
    assert sessions[0].start_s == 0.0
    assert sessions[-1].start_s == pytest.approx(100, rel=0.3)


def test_a_short_context_has_one_turn_or_is_refused() -> None:
    short = dataclasses.replace(MODEL, max_context=1100, input=LogNormal(900, 1.0, 16, 9000))
    assert all(len(session.turns) >= 1 for session in make_sessions(short, 20, 0))
    with pytest.raises(ValueError, match="1000 shared tokens"):
        make_sessions(dataclasses.replace(MODEL, max_context=1000), 1, 0)
