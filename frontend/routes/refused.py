"""Routes of other APIs and engines that this server has not: refused by name, with what to use instead."""

from aiohttp import web

from frontend.errors import RequestError

__all__ = ["routes"]

_POOLING = "this server generates text and computes no embeddings or scores"
_AUDIO = "this server generates text, and takes no audio"
_IMAGES = "this server generates text, no images or videos"
_STORAGE = "this server keeps no files or jobs: send requests one by one, many at a time"
_AGENTS = "this server keeps no assistants or conversations: use /v1/responses with previous_response_id"
_LORA = "LoRA adapters are not supported: merge them into the checkpoint"
_SLEEP = "this server has no sleep mode: stop it, converted models are kept for the next start"
_ADMIN = "an administration route: start the server with --admin-socket or --admin-port, and use that"
_CHAT = "use /v1/chat/completions"
_COMPLETIONS = "use /v1/completions"
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
    "/v1/responses/compact": "this server compacts no conversations: send a shorter one as 'input'",
    "/v1/responses/input_tokens": "use POST, with the fields of /v1/responses that make the prompt",
    "/v1/messages/batches{rest:.*}": _STORAGE,
    # vLLM and SGLang
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/sleep": _SLEEP,
    "/wake_up": _SLEEP,
    "/is_sleeping": _SLEEP,
    "/reset_prefix_cache": _ADMIN,
    "/flush_cache": "use POST /reset_prefix_cache of the administration (--admin-socket or --admin-port)",
    "/health_generate": "use /ready",
    "/get_model_info": "use /v1/models or /server_info",
    "/model_info": "use /v1/models or /server_info",
    "/get_server_info": "use /server_info",
    "/load": "use /metrics, which has the load",
    "/ping": "use /health",
    "/invocations": _CHAT,
    "/generate": _COMPLETIONS,
    "/docs": "use /openapi.json",
    # llama.cpp and Ollama
    "/completion": _COMPLETIONS,
    "/infill": "use /v1/completions with 'suffix'",
    "/apply-template": "use /tokenize with 'messages'",
    "/embedding": _POOLING,
    "/embeddings": _POOLING,
    "/reranking": _POOLING,
    "/props": "use /server_info",
    "/slots": "there are no slots: use /metrics, or /status",
    "/lora-adapters": _LORA,
    "/api/{rest:.+}": _CHAT,
    # of this server, on another socket
    "/requests": _ADMIN,
    "/abort_requests": _ADMIN,
    "/log_level": _ADMIN,
    "/restart_engines": _ADMIN,
    "/drain": _ADMIN,
    "/resume": _ADMIN,
}

routes = web.RouteTableDef()


def _refuse(path: str, reason: str) -> None:
    @routes.route("*", path)
    async def refuse(request: web.Request) -> web.Response:
        raise RequestError(f"{request.path}: {reason}", status=404, code="unsupported_route")


for _path, _reason in _REASONS.items():
    _refuse(_path, _reason)
