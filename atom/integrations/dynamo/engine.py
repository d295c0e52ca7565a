"""The engine of a Dynamo worker: its processes, and the requests that Dynamo sends."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from atom.engine.engine_host import check_no_other_servers
from atom.engine.engine_service import EngineService
from atom.integrations.dynamo.card import write_card
from atom.integrations.dynamo.reply import Reply
from atom.integrations.dynamo.request import read_request
from atom.shared.config.cache import CacheConfig
from atom.shared.config.engine import EngineConfig
from atom.shared.config.kv_events import KVEventsConfig, kv_events_config
from atom.shared.messages.engine import CoreReady, CoreStats
from atom.shared.utils import envs
from frontend.errors import EngineError
from frontend.text.output_processor import TextOptions


class DynamoEngine:
    """`prepare`, `start`, then `generate` for each request, then `close`."""

    def __init__(self, config: EngineConfig, explicit: set[str], on_death: Callable[[str], None]):
        """`explicit` names the settings that the user gave; `on_death` gets the cause, in the event loop.

        Requests whose engine ends fail: Dynamo sends the rest of them to another worker.
        Raises ValueError for a configuration that needs another program.
        """
        check_no_other_servers(config)
        self._service = EngineService(config, explicit, with_text=False, on_death=on_death)

    @property
    def config(self) -> EngineConfig:
        """The configuration, complete after `start`."""
        return self._service.host.config

    @property
    def limits(self) -> CoreReady:
        """The limits of the engine with the shortest context, after `start`."""
        limits = self._service.client.engines.limits
        assert limits is not None
        return limits

    @property
    def death(self) -> str:
        """Why no engine is left; empty while there is one."""
        return self._service.death

    def prepare(self) -> Path:
        """Read the checkpoint; returns a directory with the files that Dynamo's frontend needs.

        Raises StartError, or ValueError for a model without a tokenizer.
        """
        service = self._service
        service.prepare()
        service.host.config = replace(self.config, cache=self._with_events())
        return write_card(service.host.checkpoint, Path(envs.ATOM_CACHE_DIR) / "dynamo")

    async def start(self) -> None:
        """After `prepare`: start the engines and wait until they are ready. Raises StartError, ValueError."""
        await self._service.start()

    async def generate(self, request: dict[str, Any], name: str) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a request, whose sequences are aborted when the caller stops reading.

        Raises ApiError: RequestError for a request that cannot be served, EngineLostError and
        UnavailableError where another worker may serve it.
        """
        client = self._service.client
        inputs = self._service.parts.inputs
        room = inputs.max_model_len - len(request["token_ids"])
        read = read_request(request, room, self._service.host.checkpoint.default_sampling)
        with client.admission.slot() as slot:
            ids = client.new_ids(read.params.n)
            slot.reserve(len(ids))
            grammar = await self._service.grammar(read.constraint, read.params)
            checked = inputs.check_params(read.params, grammar)
            added = inputs.request(read.prompt_ids, read.params, ids, read.cache_salt, checked)
            added = msgspec.structs.replace(added, name=name)
            reply = Reply(ids, len(read.prompt_ids), read.tokens_as_ids)
            async with client.open([added], TextOptions(), rank=read.rank, slot=slot) as stream:
                async for updates in stream:
                    for update in updates:
                        if update.error:
                            raise EngineError(update.error)
                        yield reply.chunk(update)

    async def abort(self, name: str) -> None:
        """End the request `name`; its last chunk says that it was cancelled."""
        await self._service.client.abort_named([name])

    async def stats(self) -> dict[int, CoreStats]:
        """The counters of each engine that responds."""
        return await self._service.client.control.stats(1.0)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Where the engines publish the events of their KV caches; None where blocks are not cached."""
        return kv_events_config(self.config.cache)

    async def close(self) -> None:
        """End everything; safe after a failed start, and a second time."""
        await self._service.close()

    def _with_events(self) -> CacheConfig:
        """The settings of the KV cache, with events on a local socket unless the user has set others."""
        cache = self.config.cache
        caches_blocks = cache.enable_prefix_caching and not self._service.host.checkpoint.keeps_states
        if cache.kv_events_config is not None or not caches_blocks:
            return cache
        events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{self._service.run_dir}/kv-events"}
        return replace(cache, kv_events_config=json.dumps(events))
