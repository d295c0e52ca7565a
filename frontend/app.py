"""Puts the parts of the HTTP side together."""

import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from atom.messages.engine import CoreReady
from atom.messages.launch import FrontendLaunch
from frontend import keys
from frontend.chat_template import ChatTemplate
from frontend.engine_client import EngineClient
from frontend.input_processor import InputProcessor
from frontend.lifecycle import Lifecycle
from frontend.output_processor import OutputProcessor
from frontend.routes import generation, health, models
from frontend.routes.errors import error_middleware
from frontend.serving.chat import ChatService
from frontend.serving.completions import CompletionService
from frontend.serving.generation import ServingOptions
from frontend.serving.models import ModelService
from frontend.tokenizer import Tokenizer

__all__ = ["create_app", "start"]

MAX_BODY_BYTES = 32 * 1024 * 1024
_TOKENIZER_THREADS = min(4, os.cpu_count() or 1)
# How long handlers may take to end once draining is over, before they are cancelled.
_CLEANUP_DEADLINE_S = 0.2


def create_app(launch: FrontendLaunch) -> web.Application:
    """The application for one model. Raises ValueError for unusable tokenizer or template files."""
    checkpoint, config = launch.checkpoint, launch.config.model
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    longest = config.max_model_len or checkpoint.max_model_len
    policy = launch.config.scheduler.scheduling_policy
    inputs = InputProcessor(checkpoint, tokenizer, longest, policy)
    client = EngineClient(
        launch.core, launch.index, OutputProcessor(tokenizer), lambda ready: _adopt_limits(inputs, ready)
    )
    models_service = ModelService(config.served_model_name or config.model, inputs)
    options = ServingOptions(
        checkpoint.default_sampling,
        launch.server.default_max_tokens,
        launch.server.lenient_fields,
        has_tokenizer=tokenizer is not None,
    )
    threads = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
    parts = (client, inputs, models_service, options, threads)

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[error_middleware])
    app[keys.LIFECYCLE] = Lifecycle()
    app[keys.CLIENT] = client
    app[keys.MODELS] = models_service
    app[keys.CHAT] = ChatService(*parts, ChatTemplate.from_checkpoint(checkpoint))
    app[keys.COMPLETIONS] = CompletionService(*parts)
    for table in (generation.routes, models.routes, health.routes):
        app.add_routes(table)
    app.cleanup_ctx.append(_connection)
    app.cleanup_ctx.append(lambda _: _pool(threads))
    return app


async def start(app: web.Application, listener: socket.socket) -> web.AppRunner:
    """Serve `app` on a socket that is bound already; `cleanup` of the runner ends it."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves must not keep the engine busy
        access_log=None,
        shutdown_timeout=_CLEANUP_DEADLINE_S,
    )
    await runner.setup()
    await web.SockSite(runner, listener, backlog=1024).start()
    return runner


def _adopt_limits(inputs: InputProcessor, ready: CoreReady) -> None:
    inputs.max_model_len = ready.max_model_len


async def _connection(app: web.Application) -> AsyncIterator[None]:
    async with app[keys.CLIENT]:
        yield


async def _pool(threads: ThreadPoolExecutor) -> AsyncIterator[None]:
    yield
    threads.shutdown(wait=False, cancel_futures=True)
