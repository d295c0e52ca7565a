"""Routes of OpenAI and vLLM that need another kind of model: refused by name, with what to use instead."""

from aiohttp import web

from frontend.errors import RequestError

__all__ = ["routes"]

_POOLING = "this server generates text and computes no embeddings or scores"
_AUDIO = "this server takes and generates text only, no audio"
_IMAGES = "this server takes and generates text only, no images"
_STORAGE = "this server keeps no files or jobs: send requests one by one, many at a time"
_AGENTS = "this server keeps no assistants or conversations: use /v1/responses with previous_response_id"
_REASONS = {
    "/v1/embeddings": _POOLING,
    "/v1/rerank": _POOLING,
    "/rerank": _POOLING,
    "/v2/rerank": _POOLING,
    "/v1/score": _POOLING,
    "/score": _POOLING,
    "/pooling": _POOLING,
    "/classify": _POOLING,
    "/v1/moderations": "this server has no moderation model",
    "/v1/audio/{rest:.+}": _AUDIO,
    "/v1/realtime": _AUDIO,
    "/v1/images/{rest:.+}": _IMAGES,
    "/v1/videos{rest:.*}": _IMAGES,
    "/v1/files{rest:.*}": _STORAGE,
    "/v1/batches{rest:.*}": _STORAGE,
    "/v1/fine_tuning/{rest:.+}": _STORAGE,
    "/v1/assistants{rest:.*}": _AGENTS,
    "/v1/threads{rest:.*}": _AGENTS,
    "/v1/conversations{rest:.*}": _AGENTS,
}

routes = web.RouteTableDef()


def _refuse(path: str, reason: str) -> None:
    @routes.route("*", path)
    async def refuse(request: web.Request) -> web.Response:
        raise RequestError(f"{request.path}: {reason}", status=404, code="unsupported_route")


for _path, _reason in _REASONS.items():
    _refuse(_path, _reason)
