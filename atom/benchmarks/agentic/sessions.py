"""The sessions of a run: how many tokens each turn adds, generates and thinks.

    shared           first input    reply   tool result   reply   tool result   reply  …
    |— all sessions —|———————— turn 0 ———————|———— turn 1 ————|———— turn 2 ————|
                                             pause            pause
    a fork           has the tokens of its parent up to a turn, and turns of its own after it

A turn's prompt is everything before its reply. Lengths and pauses are drawn from log-normal distributions.
The same model and seed give the same sessions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["LogNormal", "Session", "SessionModel", "Turn", "make_sessions"]

_FORK_TURNS = 4
"""Most turns of a fork."""


@dataclass(frozen=True)
class Turn:
    """A request of a session."""

    input_tokens: int
    """New tokens of the prompt: the user's text or a tool's result."""
    output_tokens: int
    pause_s: float = 0.0
    """Seconds from the end of the last turn's reply to this request."""


@dataclass(frozen=True)
class Session:
    """The turns of one agent."""

    name: str
    turns: Sequence[Turn]
    shared_tokens: int
    """Tokens at the beginning that all sessions have in common: system prompt and tools."""
    parent: str | None = None
    """For a fork: the name of the one with whose tokens it begins."""
    parent_turns: int = 0
    """How many turns of the parent, with their replies, a fork begins with."""
    start_s: float = 0.0
    """Seconds after the start of the run; not before the parent's turns have ended."""


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution within bounds."""

    median: float
    sigma: float
    least: float
    most: float

    def draw(self, rng: np.random.Generator) -> float:
        value = self.median * math.exp(self.sigma * rng.standard_normal())
        return min(max(value, self.least), self.most)

    def draw_int(self, rng: np.random.Generator) -> int:
        return round(self.draw(rng))


@dataclass(frozen=True)
class SessionModel:
    """Distributions of sessions; the defaults are described in docs/develop/measuring.md."""

    shared_tokens: int = 16_000
    first_input: LogNormal = field(default_factory=lambda: LogNormal(400, 1.0, 16, 16_000))
    input: LogNormal = field(default_factory=lambda: LogNormal(900, 1.2, 16, 32_000))
    output: LogNormal = field(default_factory=lambda: LogNormal(317, 0.9, 8, 4_096))
    pause_s: LogNormal = field(default_factory=lambda: LogNormal(3.0, 1.2, 0.1, 60.0))
    max_context: int = 65_536
    """Most tokens of a prompt and its reply."""
    fork_probability: float = 0.03
    """After each turn; a fork starts when its parent's next turn does."""
    session_rate: float = math.inf
    """Sessions that start in a second; inf starts all at once."""


def make_sessions(model: SessionModel, count: int, seed: int) -> list[Session]:
    """`count` sessions that are no forks, and their forks, each after its parent.

    Each session ends where its next turn would not fit a context that is drawn between half of the model's
    longest and the longest. Raises ValueError if the longest context does not fit one turn.
    """
    rng = np.random.default_rng(seed)
    sessions: list[Session] = []
    start = 0.0
    for number in range(count):
        limit = int(model.max_context * rng.uniform(0.5, 1.0))
        turns = _turns(model, rng, model.shared_tokens, limit)
        if not turns:
            turns = [_only_turn(model)]
        session = Session(f"session-{number}", turns, model.shared_tokens, start_s=start)
        sessions += [session, *_forks(model, rng, session)]
        if model.session_rate != math.inf:
            start += rng.exponential(1 / model.session_rate)
    return sessions


def _turns(
    model: SessionModel, rng: np.random.Generator, context: int, limit: int, is_fork: bool = False
) -> list[Turn]:
    """Turns that follow `context` tokens and end at most at `limit`."""
    turns: list[Turn] = []
    while not is_fork or len(turns) < _FORK_TURNS:
        first = not turns and not is_fork
        input_tokens = (model.first_input if first else model.input).draw_int(rng)
        output_tokens = model.output.draw_int(rng)
        pause_s = 0.0 if first else model.pause_s.draw(rng)
        context += input_tokens + output_tokens
        if context > limit:
            break
        turns.append(Turn(input_tokens, output_tokens, pause_s))
    return turns


def _only_turn(model: SessionModel) -> Turn:
    """The shortest possible turn, for a session whose first turn is drawn too long."""
    turn = Turn(int(model.first_input.least), int(model.output.least))
    if model.shared_tokens + turn.input_tokens + turn.output_tokens > model.max_context:
        raise ValueError(
            f"a context of {model.max_context} tokens is too short for {model.shared_tokens} shared tokens "
            "and a turn"
        )
    return turn


def _forks(model: SessionModel, rng: np.random.Generator, session: Session) -> list[Session]:
    forks: list[Session] = []
    context = model.shared_tokens
    for done, turn in enumerate(session.turns, 1):
        context += turn.input_tokens + turn.output_tokens
        if rng.random() >= model.fork_probability:
            continue
        turns = _turns(model, rng, context, model.max_context, is_fork=True)
        if turns:
            name = f"{session.name}-fork-{len(forks)}"
            forks.append(Session(name, turns, model.shared_tokens, session.name, done, session.start_s))
    return forks
