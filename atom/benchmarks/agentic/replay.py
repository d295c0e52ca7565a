"""Runs sessions against a server: each turn is sent a pause after the last one's reply."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from atom.benchmarks.agentic.contexts import ChatContext, Context, IdsContext, Tokens
from atom.benchmarks.agentic.sessions import Session
from atom.benchmarks.backend_request_func import RequestFuncInput, RequestFuncOutput
from atom.benchmarks.serving.load import Send

__all__ = ["Replay", "Target", "TurnResult"]


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    api_url: str
    model: str
    is_chat: bool
    ignore_eos: bool


@dataclass(frozen=True)
class TurnResult:
    """One finished or failed request."""

    session: str
    turn: int
    known_tokens: int
    """Tokens of the prompt that were in an earlier prompt or reply: what a cache could have had."""
    output: RequestFuncOutput


class Replay:
    """One run of sessions."""

    def __init__(
        self, sessions: Sequence[Session], target: Target, tokens: Tokens, max_concurrency: int | None
    ):
        """At most `max_concurrency` sessions run at once; forks run with their parents."""
        self._sessions = sessions
        self._target = target
        self._tokens = tokens
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
        self._results: list[TurnResult] = []
        self._contexts: dict[tuple[str, int], asyncio.Future[tuple[Context, int] | None]] = {}
        """Where forks begin: a context and its number of tokens, by session and number of turns; None if the
        parent has failed before."""
        self._shared: dict[int, Context] = {}
        self._ends_at = float("inf")

    async def run(
        self, send: Send, duration_s: float | None, show_progress: bool
    ) -> tuple[list[TurnResult], float]:
        """The results in the order of their ends, and the seconds that the run took.

        No turn begins after `duration_s`; those that have begun are waited for.
        """
        loop = asyncio.get_running_loop()
        for session in self._sessions:
            if session.parent is not None:
                self._contexts.setdefault((session.parent, session.parent_turns), loop.create_future())
            self._shared_context(session.shared_tokens)  # before the first request: it takes a while
        total = sum(len(session.turns) for session in self._sessions)
        started = time.perf_counter()
        if duration_s is not None:
            self._ends_at = started + duration_s
        with tqdm(total=total, unit="turn", disable=not show_progress) as bar:
            await asyncio.gather(*(self._run_session(one, send, bar, started) for one in self._sessions))
        return self._results, time.perf_counter() - started

    async def _run_session(self, session: Session, send: Send, bar: "tqdm[None]", started: float) -> None:
        if session.parent is not None:
            found = await self._contexts[session.parent, session.parent_turns]
            if found is not None:
                await self._run_turns(session, found[0].fork(), found[1], send, bar)
            return
        if not await self._pause(max(0.0, started + session.start_s - time.perf_counter())):
            self._end(session, 0)
            return
        async with self._slots:
            context = self._shared_context(session.shared_tokens).fork()
            await self._run_turns(session, context, session.shared_tokens, send, bar)

    async def _run_turns(
        self, session: Session, context: Context, known: int, send: Send, bar: "tqdm[None]"
    ) -> None:
        """`known`: tokens of `context`, which other requests had before."""
        done = 0
        self._offer(session.name, 0, context, known)
        for done, turn in enumerate(session.turns):
            if not await self._pause(turn.pause_s):
                break
            context.add_input(self._tokens, turn.input_tokens)
            output = await send(
                self._request(session, context, known + turn.input_tokens, turn.output_tokens)
            )
            self._results.append(TurnResult(session.name, done, known, output))
            bar.update()
            if not output.success:
                break
            count = output.output_tokens or output.events
            known = (output.prompt_tokens or known + turn.input_tokens) + count
            context.add_reply(self._tokens, output.generated_text, count)
            self._offer(session.name, done + 1, context, known)
        self._end(session, done)

    def _end(self, session: Session, done: int) -> None:
        """Let no fork wait for the turns from number `done` on."""
        for later in range(done, len(session.turns) + 1):
            self._offer(session.name, later, None, 0)

    async def _pause(self, seconds: float) -> bool:
        """Whether turns may begin after so many seconds; waits for them only if so."""
        if time.perf_counter() + seconds >= self._ends_at:
            return False
        await asyncio.sleep(seconds)
        return True

    def _offer(self, session: str, turns: int, context: Context | None, known: int) -> None:
        """Let the forks that begin after so many turns run, if there are any; None: they cannot."""
        future = self._contexts.get((session, turns))
        if future is not None and not future.done():
            future.set_result(None if context is None else (context.fork(), known))

    def _shared_context(self, count: int) -> Context:
        if count not in self._shared:
            kind = ChatContext if self._target.is_chat else IdsContext
            self._shared[count] = kind.shared(self._tokens, count)
        return self._shared[count]

    def _request(
        self, session: Session, context: Context, prompt_len: int, output_len: int
    ) -> RequestFuncInput:
        prompt, fields = context.prompt()
        return RequestFuncInput(
            prompt=prompt,
            api_url=self._target.api_url,
            prompt_len=prompt_len,
            output_len=output_len,
            model=self._target.model,
            extra_body=fields or None,
            ignore_eos=self._target.ignore_eos,
            headers={"X-Session-ID": session.parent or session.name},
        )
