"""POST /start_profile and /stop_profile: torch profiler traces of the workers.

Bodies are ignored: benchmark clients send a generation request.
"""

from typing import Any

from aiohttp import web

from atom.messages.profile import ProfileResult, RankTrace
from frontend.errors import EngineError, RequestError
from frontend.keys import CLIENT, LAUNCH, LIFECYCLE

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
    result = await _switch(request, False)
    traces = [_trace_info(trace) for trace in result.traces]
    return web.json_response({"status": "success", "message": "Profiling stopped", "traces": traces})


async def _switch(request: web.Request, on: bool) -> ProfileResult:
    """Raises RequestError (404 without a trace directory, 409 when already on or off), EngineError."""
    if request.app[LAUNCH].config.observability.torch_profiler_dir is None:
        text = "profiling is off: start the server with --torch-profiler-dir"
        raise RequestError(text, status=404, code="no_profiler")
    with request.app[LIFECYCLE].admit():
        result = await request.app[CLIENT].profile(on)
    if result.refusal:
        raise RequestError(result.refusal, status=409, code="profiler_state")
    if result.error:
        raise EngineError(f"profiling failed: {result.error}", code="profiler_failed")
    return result


def _trace_info(trace: RankTrace) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "trace_dir": trace.directory,
        "trace": trace.file,
        "steps": trace.steps,
        "elapsed": round(trace.elapsed_s, 3),
    }
