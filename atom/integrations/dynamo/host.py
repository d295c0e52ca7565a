"""The engine's processes and the client that sends them requests, in one asyncio program.

A thread of its own starts the processes, watches them and restarts those that fail, as atom-launch does;
the event loop has the client. When no engine is left, `on_death` is called.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from atom.integrations.dynamo.card import write_card
from atom.integrations.dynamo.reply import Reply
from atom.integrations.dynamo.request import read_request
from atom.shared.config.cache import CacheConfig
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.kv_events import KVEventsConfig, kv_events_config
from atom.shared.config.resolve import resolve
from atom.shared.messages.engine import CoreStats
from atom.shared.messages.grammar import Grammar
from atom.shared.utils import envs
from atom.shared.utils.logger import get_logger
from atom.supervisor import StartError, Supervisor
from frontend.engine_client.client import EngineClient
from frontend.engine_client.client_settings import ClientSettings
from frontend.engine_client.dp_router import router_for
from frontend.engine_client.output_memory import default_output_memory
from frontend.errors import EngineError
from frontend.metrics.metrics import Metrics
from frontend.text.grammar_process import GrammarProcess
from frontend.text.grammars import Grammars
from frontend.text.input_processor import InputProcessor
from frontend.text.output_processor import OutputProcessor, TextOptions
from frontend.text.tokenizer import Tokenizer

_READY_S = 60.0
_MAX_QUEUED = 1024
_CHECK_S = 0.1


class EngineHost:
    """`prepare`, `start`, then `generate` for each request, then `close`."""

    checkpoint: Checkpoint
    """After `prepare`."""
    config: EngineConfig
    """Resolved, after `start`."""
    client: EngineClient
    """After `start`."""

    def __init__(self, config: EngineConfig, explicit: set[str], on_death: Callable[[str], None]):
        """`explicit` names the settings that the user gave; `on_death` gets the cause, in the event loop."""
        self._given, self._explicit, self._on_death = config, explicit, on_death
        self._supervisor = Supervisor()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._grammars: Grammars | None = None
        self.death = ""
        """Why no engine is left; empty while there is one."""

    def prepare(self) -> Path:
        """Read the checkpoint; returns a directory with the files that Dynamo's frontend needs.

        Raises StartError, or ValueError for a model without a tokenizer.
        """
        self.checkpoint, self._capabilities = self._supervisor.prepare(self._given.model)
        return write_card(self.checkpoint, Path(envs.ATOM_CACHE_DIR) / "dynamo")

    async def start(self) -> None:
        """After `prepare`: start the engines and wait until they are ready. Raises StartError, ValueError."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._supervise, args=[started], name="supervisor")
        self._thread.start()
        await started
        tokenizer = Tokenizer.from_checkpoint(self.checkpoint)
        config, limit = self.config, self.checkpoint.max_model_len
        self._inputs = InputProcessor(self.checkpoint, tokenizer, limit, config.scheduler.scheduling_policy)
        assert config.scheduler.max_num_seqs is not None
        settings = ClientSettings(
            config.parallel.data_parallel_size,
            config.scheduler.max_num_seqs,
            _MAX_QUEUED,
            hang_timeout=config.reliability.hang_timeout,
            max_output_bytes=default_output_memory(1),
        )
        self.client = EngineClient(
            self._supervisor.engines,
            settings,
            router_for(config, settings.num_ranks),
            OutputProcessor(None),
            Metrics(),
            lambda max_model_len: setattr(self._inputs, "max_model_len", max_model_len),
        )
        self._grammars = Grammars(GrammarProcess(self.checkpoint))
        await self.client.__aenter__()
        await asyncio.wait_for(self.client.wait_ready(), _READY_S)

    async def generate(self, request: dict[str, Any], name: str) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a request, whose sequences are aborted when the caller stops reading.

        Raises ApiError: RequestError for a request that cannot be served, EngineLostError and
        UnavailableError where another worker may serve it.
        """
        room = self._inputs.max_model_len - len(request["token_ids"])
        read = read_request(request, room, self.checkpoint.default_sampling)
        with self.client.admission.slot() as slot:
            ids = self.client.new_ids(read.params.n)
            slot.reserve(ids)
            checked = self._inputs.check_params(read.params, await self._grammar(read))
            added = self._inputs.request(read.prompt_ids, read.params, ids, read.cache_salt, checked)
            added = msgspec.structs.replace(added, name=name)
            reply = Reply(ids, len(read.prompt_ids), read.tokens_as_ids)
            async with self.client.open([added], TextOptions(), rank=read.rank) as stream:
                async for updates in stream:
                    for update in updates:
                        if update.error:
                            raise EngineError(update.error)
                        yield reply.chunk(update)

    async def abort(self, name: str) -> None:
        """End the request `name`; its last chunk says that it was cancelled."""
        await self.client.abort_named([name])

    async def stats(self) -> dict[int, CoreStats]:
        """The counters of each engine that responds."""
        return await self.client.control.stats(1.0)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Where the engines publish the events of their KV caches; None where blocks are not cached."""
        return kv_events_config(self.config.cache)

    async def close(self) -> None:
        """End everything; safe after a failed start, and a second time."""
        self._stop.set()
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None
            await self.client.__aexit__(None, None, None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._supervisor.close()

    async def _grammar(self, read: Any) -> Grammar | None:
        if read.constraint is None:
            return None
        assert self._grammars is not None
        row = self._inputs.row_grammar(read.constraint, read.params, None)
        return self._grammars.grammar(row, await self._grammars.compile(read.constraint))

    # The supervisor's thread

    def _supervise(self, started: "asyncio.Future[None]") -> None:
        supervisor = self._supervisor
        try:
            self._start_engines()
            known = supervisor.engines
            self._loop.call_soon_threadsafe(started.set_result, None)
            supervisor.restart_failed()
            while not self._stop.is_set():
                supervisor.check(_CHECK_S)
                if supervisor.engines != known:
                    known, state = supervisor.engines, supervisor.engine_state
                    self._loop.call_soon_threadsafe(self.client.update, state.engines, state.ended)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._failed, error, started)
        finally:
            supervisor.close()

    def _start_engines(self) -> None:
        supervisor = self._supervisor
        given = replace(self._given, cache=self._with_events())
        resolved = resolve(given, self.checkpoint, self._explicit, self._capabilities)
        self.config = resolved.config
        for note in resolved.notes + envs.startup_notes(self.config.device.device, self._capabilities.rocm):
            get_logger().info(note)
        supervisor.start_engines(self.config, self.checkpoint)
        while not supervisor.is_ready:
            if self._stop.is_set():
                raise StartError("the start was interrupted")
            supervisor.check(_CHECK_S)

    def _with_events(self) -> CacheConfig:
        """The settings of the KV cache, with events on a local socket unless the user has set others."""
        cache, caches_blocks = self._given.cache, not self.checkpoint.keeps_states
        if cache.kv_events_config is not None or not (cache.enable_prefix_caching and caches_blocks):
            return cache
        events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{self._supervisor.run_dir}/kv-events"}
        return replace(cache, kv_events_config=json.dumps(events))

    def _failed(self, error: Exception, started: "asyncio.Future[None]") -> None:
        if not started.done():
            started.set_exception(error)
            return
        self.death = str(error)
        get_logger().error("no engine is left: %s", error)
        self.client.update([])
        self._on_death(self.death)
