"""Supervised engines and their client, in one asyncio program.

A thread of its own starts the processes, watches them and restarts those that fail, as atom-launch does;
the event loop has the client.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from atom.engine.client_parts import ClientParts
from atom.engine.engine_host import EngineHost
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.grammar import Grammar
from atom.shared.messages.supervisor import EngineEnded, Engines, Progress
from atom.shared.sampling_params import SamplingParams
from atom.shared.utils.logger import get_logger
from atom.supervisor import StartError, Supervisor
from frontend.engine_client.client import EngineClient
from frontend.engine_client.client_settings import ClientHooks, ClientSettings
from frontend.engine_client.output_memory import default_output_memory
from frontend.metrics.metrics import Metrics
from frontend.text.constraint import Constraint
from frontend.text.grammar_compiler import GrammarCompiler
from frontend.text.output_processor import OutputProcessor

__all__ = ["EngineService"]

_READY_S = 60.0
_MAX_QUEUED = 1024
_CHECK_S = 0.1


class EngineService:
    """`start`, then requests to `client`, then `close`. `prepare` may be called before `start`."""

    client: EngineClient
    """After `start`."""
    parts: ClientParts
    """After `start`."""

    def __init__(
        self,
        config: EngineConfig,
        explicit: set[str],
        with_text: bool = True,
        max_replays: int = 0,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_death: Callable[[str], None] = lambda reason: None,
    ):
        """`explicit` names the settings that the user gave.

        Without `with_text` updates have token ids only. A sequence whose engine ends is sent to another one
        `max_replays` times. `on_progress` is called in the supervisor's thread; `on_death` in the event loop,
        with the cause, once no engine is left.
        """
        self.host = EngineHost(config, explicit)
        self.death = ""
        """Why no engine is left; empty while there is one."""
        self._with_text = with_text
        self._max_replays = max_replays
        self._on_death = on_death
        self._supervisor = Supervisor(on_progress, self._on_turn)
        self._is_prepared = False
        self._is_starting = True
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._open = contextlib.AsyncExitStack()
        self._grammars: GrammarCompiler | None = None

    @property
    def run_dir(self) -> Path:
        """Directory of the sockets, which exists until `close`."""
        return self._supervisor.run_dir

    def prepare(self) -> None:
        """Read the checkpoint and examine the host. Raises StartError."""
        self.host.prepare(self._supervisor.prepare)
        self._is_prepared = True

    async def start(self) -> None:
        """Start the engines and wait until they are ready; `close` it, too, when this has failed.

        Raises StartError, or ValueError for invalid settings.
        """
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        owner = threading.current_thread()
        self._thread = threading.Thread(target=self._supervise, args=[started, owner], name="supervisor")
        self._thread.start()
        await started
        self.parts = ClientParts.of(self.host)
        self._grammars = GrammarCompiler(self.parts.grammar_process)
        self._open.callback(self._grammars.close)
        self.client = EngineClient(
            self._supervisor.engines,
            self._client_settings(),
            self.parts.router,
            OutputProcessor(self.parts.inputs.tokenizer if self._with_text else None),
            Metrics(),
            ClientHooks(self._on_ready, grammar_source=self._grammars.live.source),
        )
        await self._open.enter_async_context(self.client)
        await asyncio.wait_for(self.client.engines.wait_started(), _READY_S)

    async def grammar(self, constraint: Constraint | None, params: SamplingParams) -> Grammar | None:
        """The compiled grammar for a request. Raises RequestError, OverloadedError or UnavailableError."""
        if constraint is None:
            return None
        assert self._grammars is not None, "the service was not started"
        row = self.parts.inputs.row_grammar(constraint, params, None)
        return self._grammars.live.grammar(row, await self._grammars.compile(constraint))

    async def close(self) -> None:
        """End everything. Safe after a failed start, and a second time."""
        self._stop.set()
        await self._open.aclose()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._supervisor.close()

    def _client_settings(self) -> ClientSettings:
        config = self.host.config
        assert config.scheduler.max_num_seqs is not None, "the configuration was not resolved"
        return ClientSettings(
            config.parallel.data_parallel_size,
            config.scheduler.max_num_seqs,
            _MAX_QUEUED,
            hang_timeout=config.reliability.hang_timeout,
            max_output_bytes=default_output_memory(1),
            max_replays=self._max_replays,
            engines_end_together=config.parallel.lockstep,
            prefill_engines=config.parallel.prefill_engines,
            prefill_min_tokens=config.parallel.prefill_min_tokens,
            block_tokens=config.block_tokens,
        )

    def _on_ready(self, max_model_len: int) -> None:
        self.parts.inputs.max_model_len = max_model_len

    def _update(self, state: Engines) -> None:
        """Tell the client which engines there are; before it exists, it is made with the current ones."""
        if hasattr(self, "client") and not self._stop.is_set():
            self.client.set_engines(state.engines, state.ended)

    def _fail(self, error: Exception, last: Engines, started: "asyncio.Future[None]") -> None:
        """Note that the supervisor has ended with this error; `last` were the engines before."""
        if not started.done() or started.cancelled():
            _settle(started, error)
            return
        self.death = str(error)
        get_logger().error("no engine is left: %s", error)
        self._update(Engines([], _final(last, self.death)))
        self._on_death(self.death)

    # In the supervisor's thread

    def _supervise(self, started: "asyncio.Future[None]", owner: threading.Thread) -> None:
        """Start the engines, and watch them until `close`, or the end of the event loop's thread."""
        supervisor = self._supervisor
        try:
            if not self._is_prepared:
                self.prepare()
            self.host.resolve()
            self.host.start(supervisor)
            supervisor.wait_ready()
            self._is_starting = False
            known = supervisor.engines
            self._loop.call_soon_threadsafe(_settle, started)
            supervisor.restart_failed()
            # A program that ends without `close` waits for this thread.
            while not self._stop.is_set() and owner.is_alive():
                supervisor.check(_CHECK_S)
                if supervisor.engines != known:
                    known = supervisor.engines
                    self._loop.call_soon_threadsafe(self._update, supervisor.engine_state)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error, supervisor.engine_state, started)
        finally:
            supervisor.close()

    def _on_turn(self) -> None:
        """Called several times a second; ends a start that nobody waits for any more."""
        if self._is_starting and self._stop.is_set():
            raise StartError("the start was interrupted")


def _settle(started: "asyncio.Future[None]", error: Exception | None = None) -> None:
    """Tell `EngineService.start` how the start has ended, unless it was cancelled meanwhile."""
    if started.done():
        return
    if error is None:
        started.set_result(None)
    else:
        started.set_exception(error)


def _final(last: Engines, cause: str) -> list[EngineEnded]:
    """The ends of all engines, none of which starts again: what waits for one must not wait any more."""
    before = [EngineEnded(end.rank, end.life, end.reason, is_final=True) for end in last.ended]
    return before + [EngineEnded(each.rank, each.life, cause, is_final=True) for each in last.engines]
