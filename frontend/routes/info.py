"""GET /version, /server_info and /metrics."""

import asyncio
import platform
from dataclasses import asdict
from typing import Any

import msgspec
from aiohttp import web

from atom.shared.config.server import ServerConfig
from atom.shared.utils.version import atom_version
from frontend.http.json_response import json_response
from frontend.keys import CLIENT, LAUNCH, LIMITS, MODELS, SHARED_METRICS
from frontend.metrics.exposition import CONTENT_TYPE, Snapshot, expose

__all__ = ["routes"]

routes = web.RouteTableDef()

_VERSION = atom_version()


@routes.get("/version")
async def show_version(request: web.Request) -> web.Response:
    """The version of this server."""
    return web.json_response({"version": _VERSION})


@routes.get("/server_info")
async def server_info(request: web.Request) -> web.Response:
    """The resolved configuration, without API keys."""
    launch = request.app[LAUNCH]
    ready = request.app[CLIENT].engines.limits
    checkpoint = launch.checkpoint
    info = {
        "version": _VERSION,
        "python": platform.python_version(),
        "model": request.app[MODELS].name,
        "architecture": checkpoint.architecture,
        "vocab_size": checkpoint.vocab_size,
        "engine": None if ready is None else msgspec.structs.asdict(ready),
        "engines": [
            {"rank": engine.rank, "life": engine.life, "state": engine.link.state.value}
            for engine in sorted(request.app[CLIENT].engines, key=lambda engine: engine.rank)
        ],
        "config": msgspec.to_builtins(launch.config),
        "server": _without_keys(launch.server),
    }
    return json_response(info)


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """Prometheus text: the sums over all frontends, and the counters of the engines that respond."""
    client = request.app[CLIENT]
    deadline_s = request.app[LIMITS].stats_deadline_s
    stats, totals = await asyncio.gather(
        client.control.stats(deadline_s), request.app[SHARED_METRICS].totals(deadline_s)
    )
    launch = request.app[LAUNCH]
    snapshot = Snapshot(
        model=request.app[MODELS].name,
        metrics=totals.metrics,
        engines=stats,
        engine_up=client.engines.up,
        engine_restarts=dict(client.engines.restarts),
        live=totals.live,
        block_size=launch.config.block_tokens,
        forced_length=launch.config.speculative.forced_length,
        frontend=launch.index if launch.num_frontends > 1 else None,
    )
    body = await asyncio.to_thread(expose, snapshot)  # about 3 ms for each engine
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def _without_keys(server: ServerConfig) -> dict[str, Any]:
    shown = asdict(server)
    shown["api_key"] = server.api_key is not None
    return shown
