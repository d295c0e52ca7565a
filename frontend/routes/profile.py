"""POST /start_profile and /stop_profile: traces of what the workers compute.

Bodies are not read: benchmark clients send one of their requests.
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
    """Record from now on."""
    await _switch(request, True)
    return web.json_response({"status": "success", "message": "Profiling started"})


@routes.post("/stop_profile")
async def stop_profile(request: web.Request) -> web.Response:
    """End the recording; answered when every rank has written its file."""
    answer = await _switch(request, False)
    traces = [_shown(trace) for trace in answer.traces]
    return web.json_response({"status": "success", "message": "Profiling stopped", "traces": traces})


async def _switch(request: web.Request, on: bool) -> ProfileResult:
    """Raises RequestError (404 without a directory for traces, 409 out of turn), EngineError."""
    if request.app[LAUNCH].config.observability.torch_profiler_dir is None:
        text = "this server writes no profiles: start it with --torch-profiler-dir"
        raise RequestError(text, status=404, code="no_profiler")
    with request.app[LIFECYCLE].admit():
        answer = await request.app[CLIENT].profile(on)
    if answer.refusal:
        raise RequestError(answer.refusal, status=409, code="profiler_state")
    if answer.error:
        raise EngineError(f"profiling failed: {answer.error}", code="profiler_failed")
    return answer


def _shown(trace: RankTrace) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "trace_dir": trace.directory,
        "trace": trace.file,
        "steps": trace.steps,
        "elapsed": round(trace.elapsed_s, 3),
    }
