"""POST /start_profile and /stop_profile: torch profiler traces of the workers.

Bodies are ignored: benchmark clients send a generation request.
"""

import ipaddress
from typing import Any

from aiohttp import web

from atom.shared.messages.profile import ProfileResult, RankTrace
from frontend.errors import EngineError, RequestError
from frontend.keys import API_KEYS, CLIENT, IS_ADMIN, LAUNCH, LIFECYCLE

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.post("/start_profile")
async def start_profile(request: web.Request) -> web.Response:
    """Start recording."""
    await _switch(request, True)
    return web.json_response({"status": "success", "message": "Profiling started"})


@routes.post("/stop_profile")
async def stop_profile(request: web.Request) -> web.Response:
    """Stop recording; responds when all ranks have written their trace files."""
    results = await _switch(request, False)
    ranks = request.app[LAUNCH].config.parallel.tensor_parallel_size
    traces = [
        _trace_info(trace, engine * ranks + trace.rank)
        for engine, result in results
        for trace in result.traces
    ]
    return web.json_response({"status": "success", "message": "Profiling stopped", "traces": traces})


async def _switch(request: web.Request, on: bool) -> list[tuple[int, ProfileResult]]:
    """The results of the engines that did it, with their ranks.

    Raises RequestError (404 without a trace directory, 403 for other hosts, 409 when already on or off),
    EngineError.
    """
    if request.app[LAUNCH].config.observability.torch_profiler_dir is None:
        text = "profiling is off: start the server with --torch-profiler-dir"
        raise RequestError(text, status=404, code="no_profiler")
    is_trusted = request.app.get(IS_ADMIN, False) or request.app[API_KEYS].is_required
    if not is_trusted and not _is_loopback(request.remote):
        text = "without an API key, profiling is served to this host only: start the server with --api-key"
        raise RequestError(text, status=403, code="profiler_needs_key")
    lifecycle = request.app[LIFECYCLE]
    with lifecycle.admit(), lifecycle.interruptible():
        results = await request.app[CLIENT].control.profile(on)
    for _, result in results:
        if result.error:
            raise EngineError(f"profiling failed: {result.error}", code="profiler_failed")
    # An engine that was started in between refuses to stop what it has never begun.
    if done := [(engine, result) for engine, result in results if not result.refusal]:
        return done
    raise RequestError(results[0][1].refusal, status=409, code="profiler_state")


def _is_loopback(host: str | None) -> bool:
    if host is None:
        return False
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _trace_info(trace: RankTrace, rank: int) -> dict[str, Any]:
    """`rank` counts the workers of all engines."""
    return {
        "rank": rank,
        "trace_dir": trace.directory,
        "trace": trace.file,
        "steps": trace.steps,
        "elapsed": round(trace.elapsed_s, 3),
    }
