"""The engine as Dynamo's runtime drives it.

The runtime registers the model, serves the endpoint, notices clients that are gone, and on SIGTERM
leaves the discovery, waits for running streams and calls `cleanup`.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.llm import exceptions

from atom.integrations.dynamo.engine import DynamoEngine
from atom.shared.config.cli import (
    CommandLineParser,
    add_engine_args,
    engine_config_from,
    explicit_fields,
    with_environment,
)
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.engine import CoreStats
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.logger import set_log_level, setup_logging
from atom.supervisor import StartError
from frontend.errors import EngineLostError, OverloadedError, RequestError, UnavailableError

_STATS_S = 0.25
_FLAGS = (
    ("namespace", "DYN_NAMESPACE", "dynamo", "Namespace of the worker's endpoint."),
    ("component", "DYN_COMPONENT", "backend", "Component of the worker's endpoint."),
    ("endpoint", "DYN_ENDPOINT", "generate", "Name of the worker's endpoint."),
    ("endpoint-types", "DYN_ENDPOINT_TYPES", "chat,completions", "OpenAI endpoints of the model."),
    ("discovery-backend", "DYN_DISCOVERY_BACKEND", "etcd", "etcd, file, kubernetes or mem."),
    ("request-plane", "DYN_REQUEST_PLANE", "tcp", "tcp or nats."),
    ("response-plane", "DYN_RESPONSE_PLANE", "tcp", "tcp or quic."),
    ("event-plane", "DYN_EVENT_PLANE", None, "zmq or nats."),
    ("tool-call-parser", "DYN_TOOL_CALL_PARSER", None, "Dynamo's parser of tool calls."),
    ("reasoning-parser", "DYN_REASONING_PARSER", None, "Dynamo's parser of reasoning."),
)


class AtomWorker(LLMEngine):
    """One worker: all data-parallel ranks of one ATOM engine."""

    def __init__(self, config: EngineConfig, explicit: set[str]):
        self.engine = DynamoEngine(config, explicit, self._on_death)
        self.start_error: Exception | None = None
        self.card = ""
        """Directory with the files that Dynamo's frontend reads."""
        self._snapshots: Any = None
        self._publishing: asyncio.Task[None] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["AtomWorker", WorkerConfig]:
        """The worker and its place in Dynamo, by the command line and the environment."""
        args = with_environment(_parser().parse_args(argv))
        config = engine_config_from(args)
        set_log_level(config.observability.log_level)
        place = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name, *_ in _FLAGS}
        names = config.model.names
        worker = cls(config, set(explicit_fields(args)))
        worker.card = str(worker.engine.prepare())
        return worker, WorkerConfig(model_name=worker.card, served_model_name=names[0], **place)

    async def start(self, worker_id: int) -> Registration:
        """Start the engine; what the router and the frontend know of it."""
        try:
            await self.engine.start()
        except Exception as error:
            self.start_error = error
            raise
        config = self.engine.config
        limits = self.engine.limits
        names = config.model.names
        return Registration(
            model=self.card,
            served_model_name=names[0],
            model_aliases=list(names[1:]),
            llm=LlmRegistration(
                context_length=limits.max_model_len,
                kv_cache_block_size=config.block_tokens,
                total_kv_blocks=limits.kv_tokens // config.block_tokens,
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
                data_parallel_size=config.parallel.data_parallel_size,
            ),
        )

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a request.

        Where the engine has died, the exception makes Dynamo send the rest of the request to another worker.
        """
        chunks = self.engine.generate(request, context.id())
        try:
            async with contextlib.aclosing(chunks):  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        except RequestError as error:
            raise exceptions.InvalidArgument(error.message) from None
        except (EngineLostError, UnavailableError) as error:
            raise exceptions.EngineShutdown(error.message) from None
        except OverloadedError as error:
            raise exceptions.WorkerUnavailable(error.message) from None

    async def abort(self, context: Any) -> None:
        """End the request of a client that is gone."""
        with contextlib.suppress(EngineLostError, UnavailableError):
            await self.engine.abort(context.id())

    async def cleanup(self) -> None:
        """End the engine's processes."""
        if self._publishing is not None:
            self._publishing.cancel()
        await self.engine.close()

    async def kv_event_sources(self) -> list[ZmqSource]:
        """The PUB socket of each rank."""
        events = self.engine.kv_events
        if events is None:
            return []
        ranks = range(self.engine.config.parallel.data_parallel_size)
        return [ZmqSource(events.of_rank(rank).local_endpoint, events.topic, rank) for rank in ranks]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Each rank tells its load."""
        return list(range(self.engine.config.parallel.data_parallel_size))

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Where the load of the ranks goes."""
        self._snapshots = publisher

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Serving begins: tell the load from now on."""
        self._publishing = asyncio.create_task(self._publish_load())

    async def health_check_payload(self) -> dict[str, Any]:
        """A request for one token."""
        found: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return found

    async def _publish_load(self) -> None:
        while True:
            if self._snapshots is not None:
                for rank, stats in (await self.engine.stats()).items():
                    self._snapshots.publish(rank, _snapshot(rank, stats))
            await asyncio.sleep(_STATS_S)

    def _on_death(self, reason: str) -> None:
        """Without an engine the worker leaves as it does on SIGTERM; `run` then returns a failure."""
        os.kill(os.getpid(), signal.SIGTERM)


def run(argv: list[str]) -> int:
    """Serve until SIGTERM; returns the exit status."""
    setup_logging("dynamo")
    return uvloop.run(_serve(argv))


async def _serve(argv: list[str]) -> int:
    try:
        worker, config = await AtomWorker.from_args(argv)
    except (StartError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _status_of(error)
    try:
        await Worker(worker, config).run()
    except Exception as error:
        cause = worker.start_error or error
        print(f"error: {cause}", file=sys.stderr)
        return _status_of(cause)
    finally:
        await worker.cleanup()
    return ExitStatus.FAILURE if worker.engine.death else ExitStatus.DONE


def _status_of(error: Exception) -> int:
    """A ValueError is about a setting."""
    if isinstance(error, StartError):
        return error.status
    return ExitStatus.USAGE if isinstance(error, ValueError) else ExitStatus.FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = CommandLineParser(
        prog="python -m atom.integrations.dynamo", description="Serve a model as a worker of NVIDIA Dynamo."
    )
    add_engine_args(parser)
    group = parser.add_argument_group("dynamo")
    for name, variable, default, text in _FLAGS:
        value = os.environ.get(variable, default)
        group.add_argument(f"--{name}", default=value, metavar="TEXT", help=f"{text} [env: {variable}]")
    return parser


def _snapshot(rank: int, stats: CoreStats) -> ComponentSnapshot:
    total = max(stats.kv_blocks_total, 1)
    return ComponentSnapshot(
        kv_used_blocks=stats.kv_blocks_used,
        kv_total_blocks=stats.kv_blocks_total,
        gpu_cache_usage=stats.kv_blocks_used / total,
        dp_rank=rank,
        kv_cache_hit_rate=stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else None,
    )
