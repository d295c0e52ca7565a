"""Builds the HTTP application of one model and starts serving it."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from aiohttp import web

from atom.shared.config.images import image_limit, media_domains
from atom.shared.config.kv_peers import prompt_transfer
from atom.shared.config.server import ServerConfig
from atom.shared.messages.admin import ServerState
from atom.shared.messages.launch import FrontendLaunch
from atom.shared.messages.supervisor import Engines
from atom.shared.utils.logger import get_logger, set_log_level
from frontend import keys
from frontend.admin import create_admin_app
from frontend.api.chat.endpoint import ChatEndpoint
from frontend.api.chat.formats import GENERIC, ChatFormat, ChatFormats
from frontend.api.chat.prompts import ChatPrompts
from frontend.api.completions.endpoint import CompletionEndpoint
from frontend.api.generation.generation import Generation
from frontend.api.generation.kv_transfer import TransferRules
from frontend.api.generation.preparation import RequestPreparer, ServingOptions
from frontend.api.generation.prompt_images import PromptImages
from frontend.api.generation.prompts import PromptEncoder
from frontend.api.messages.endpoint import MessagesEndpoint
from frontend.api.models.service import ModelService, fingerprint
from frontend.api.responses.endpoint import ResponsesEndpoint
from frontend.api.responses.response_store import ResponseStore
from frontend.api.tokenization.service import TokenizationService
from frontend.engine_client.client import EngineClient
from frontend.engine_client.client_settings import ClientHooks, ClientSettings
from frontend.engine_client.dp_router import router_for
from frontend.engine_client.output_memory import default_output_memory
from frontend.engine_client.supervisor_link import SupervisorLink
from frontend.http.auth import ApiKeys
from frontend.http.body_memory import BodyMemory
from frontend.http.connections import Listener
from frontend.http.cors import CorsPolicy
from frontend.http.expect import expect_middleware
from frontend.http.lifecycle import Lifecycle
from frontend.http.limits import HttpLimits
from frontend.http.loop_lag import watch_loop
from frontend.http.other_sockets import OtherSockets
from frontend.http.tls import follow_files, tls_context
from frontend.images.image_fetcher import ImageFetcher
from frontend.images.image_parts import ImageRules
from frontend.images.image_preparer import ImagePreparer
from frontend.images.image_process import ImageProcess
from frontend.metrics.metrics import Metrics
from frontend.metrics.shared_metrics import SharedMetrics
from frontend.metrics.tracing import Tracing
from frontend.routes import (
    generation,
    health,
    info,
    models,
    openapi,
    page,
    profile,
    refused,
    requests,
    responses,
    status,
    streams,
    tokenization,
)
from frontend.routes.access import access_middleware
from frontend.routes.cors import add_cors_headers, cors_middleware
from frontend.routes.errors import add_request_id, error_middleware
from frontend.status.feed import StatusFeed
from frontend.text.chat_encoder import ChatEncoder
from frontend.text.chat_template import ChatTemplate
from frontend.text.fim import FillInTheMiddle
from frontend.text.grammar_compiler import GrammarCompiler
from frontend.text.grammar_process import GrammarProcess
from frontend.text.input_processor import InputProcessor
from frontend.text.output_processor import OutputProcessor
from frontend.text.reply_formats.choose import choose_format
from frontend.text.text_executor import TextExecutor
from frontend.text.tokenizer import Tokenizer

__all__ = ["create_app", "start"]

# Seconds after draining until handlers are cancelled.
_CLEANUP_DEADLINE_S = 1.0
# max_tokens of requests that set none.
_CHAT_TOKENS = 8192
_COMPLETION_TOKENS = 256
# JSON bytes: English text has 4 to 5 per token, Chinese as \u escapes about 9.
_BYTES_PER_TOKEN = 16
_BODY_WITH_IMAGES = 64 * 1024 * 1024
_ROUTES = (
    generation.routes,
    responses.routes,
    streams.routes,
    tokenization.routes,
    models.routes,
    requests.routes,
    info.routes,
    openapi.routes,
    health.routes,
    profile.routes,
    refused.routes,
)


def create_app(launch: FrontendLaunch, limits: HttpLimits | None = None) -> web.Application:
    """The application for one model.

    Raises ValueError for unusable API keys, CORS or TLS settings, tokenizer or template files.
    """
    limits = limits or HttpLimits(max_body_bytes=_max_body_bytes(launch))
    app = web.Application(
        middlewares=[error_middleware, cors_middleware, access_middleware, expect_middleware]
    )
    app[keys.LAUNCH] = launch
    app[keys.LIMITS] = limits
    app[keys.BODY_MEMORY] = BodyMemory(max(limits.max_body_memory, 2 * limits.max_body_bytes))
    app[keys.API_KEYS] = ApiKeys(launch.server.api_key)
    app[keys.CORS] = CorsPolicy(launch.server)
    app[keys.TLS] = tls_context(launch.server)
    app[keys.LIFECYCLE] = Lifecycle()
    app[keys.OTHER_SOCKETS] = OtherSockets(launch.other_fds)
    app[keys.METRICS] = Metrics()
    app[keys.SUPERVISOR] = SupervisorLink(launch.control, launch.index, launch.state)
    _add_services(app, launch, limits)
    client = app[keys.CLIENT]
    app[keys.SHARED_METRICS] = SharedMetrics(
        launch.run_dir,
        launch.index,
        launch.life,
        app[keys.METRICS],
        client.__len__,
        client.oldest_requests,
    )
    if not launch.server.disable_status_page:
        _add_status_page(app, launch)
    for table in _ROUTES:
        app.add_routes(table)
    _apply(app, launch.state)
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(add_cors_headers)
    app.on_response_prepare.append(_close_while_draining)
    app.cleanup_ctx.append(_engine_links)
    app.cleanup_ctx.append(_metrics_file)
    app.cleanup_ctx.append(_loop_watch)
    app.cleanup_ctx.append(_certificate_watch)
    app.cleanup_ctx.append(_admin_server)
    app.on_shutdown.append(_close_sockets)
    return app


def _add_services(app: web.Application, launch: FrontendLaunch, limits: HttpLimits) -> None:
    checkpoint = launch.checkpoint
    config = launch.config.model
    server = launch.server
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    max_model_len = config.max_model_len or checkpoint.max_model_len
    inputs = InputProcessor(
        checkpoint,
        tokenizer,
        max_model_len,
        launch.config.scheduler.scheduling_policy,
        launch.config.speculative,
    )
    settings = _client_settings(launch, limits)
    is_alone = launch.num_frontends == 1 or not launch.control
    grammars = GrammarCompiler(GrammarProcess(checkpoint))
    client = EngineClient(
        launch.engines,
        settings,
        router_for(launch.config, settings.num_ranks, launch.index),
        OutputProcessor(tokenizer),
        app[keys.METRICS],
        ClientHooks(
            inputs.set_max_model_len,
            None if is_alone else app[keys.SUPERVISOR].want_trial,
            grammars.live.source,
            app[keys.SUPERVISOR].handed_stream,
        ),
    )
    formats = _chat_formats(launch, inputs)
    models_service = ModelService(
        config.names,
        inputs,
        None if formats is None else formats.tool_form,
        launch.config.speculative.forced_length,
    )
    options = ServingOptions(
        checkpoint.default_sampling,
        has_tokenizer=tokenizer is not None,
        fingerprint=fingerprint(launch.config, checkpoint),
        transfer=TransferRules(
            prompt_transfer(launch.config.cache, launch.config.parallel),
            launch.config.parallel.tensor_parallel_size,
            server.lenient_fields,
        ),
    )
    executor = TextExecutor()
    app[keys.CLIENT] = client
    app[keys.MODELS] = models_service
    endpoint = server.otlp_traces_endpoint
    tracing = None if endpoint is None else Tracing(endpoint)
    rules = _image_rules(launch)
    images = None if rules.refusal else _prompt_images(launch, inputs, executor, rules)
    app[keys.PREPARER] = RequestPreparer(client, inputs, models_service, options, executor, grammars, images)
    app[keys.GENERATION] = Generation(client, executor, tracing, images)
    app.cleanup_ctx.append(lambda _: _close_tracing(tracing))
    prompts = ChatPrompts(formats, server.lenient_fields, rules)
    chat = ChatEndpoint(inputs, _encoder(inputs, server, _CHAT_TOKENS), prompts, server.lenient_fields)
    app[keys.CHAT] = chat
    app[keys.COMPLETIONS] = CompletionEndpoint(
        _encoder(inputs, server, _COMPLETION_TOKENS), FillInTheMiddle.of(tokenizer), server.lenient_fields
    )
    store = ResponseStore(server.max_stored_response_bytes, launch.num_frontends)
    app[keys.RESPONSE_STORE] = store
    responses = ResponsesEndpoint(
        inputs,
        _encoder(inputs, server, _CHAT_TOKENS),
        prompts,
        models_service,
        store,
        limits.max_body_bytes,
        server.lenient_fields,
    )
    app[keys.RESPONSES] = responses
    messages = MessagesEndpoint(inputs, prompts, models_service, server.lenient_fields)
    app[keys.MESSAGES] = messages
    app[keys.TOKENIZATION] = TokenizationService(
        inputs, models_service, chat, messages, responses, executor, images
    )
    app.cleanup_ctx.append(lambda _: _shut_down(executor, grammars, images))


def _image_rules(launch: FrontendLaunch) -> ImageRules:
    config = launch.config
    method = config.speculative.method
    if launch.checkpoint.images is not None and not config.speculative.reads_images:
        return ImageRules(f"with --method {method} this server reads text alone: what drafts sees no images")
    return ImageRules(
        launch.checkpoint.no_images,
        image_limit(config.model.limit_mm_per_prompt),
        media_domains(launch.server.allowed_media_domains),
    )


def _prompt_images(
    launch: FrontendLaunch, inputs: InputProcessor, executor: TextExecutor, rules: ImageRules
) -> PromptImages:
    settings = launch.checkpoint.images
    assert settings is not None, "the server takes images"
    fetcher = ImageFetcher(rules.domains) if rules.domains else None
    preparer = ImagePreparer(ImageProcess(launch.checkpoint), settings, fetcher)
    return PromptImages(preparer, inputs, executor, default_output_memory(launch.num_frontends))


def _chat_formats(launch: FrontendLaunch, inputs: InputProcessor) -> ChatFormats | None:
    template = ChatTemplate.from_checkpoint(launch.checkpoint)
    if template is None:
        return None
    plain = _chat_format(template, launch, inputs)
    for_tools = ChatTemplate.tools_from_checkpoint(launch.checkpoint)
    formats = ChatFormats(plain, plain if for_tools is None else _chat_format(for_tools, launch, inputs))
    if formats.tool_form == GENERIC and (launch.index, launch.life) == (0, 0):
        get_logger().info(
            "the chat template reads no tools: a system message describes those of a request, in a generic "
            "format (--tool-call-parser none refuses tools)"
        )
    return formats


def _chat_format(template: ChatTemplate, launch: FrontendLaunch, inputs: InputProcessor) -> ChatFormat:
    server = launch.server
    reply_format = choose_format(
        launch.checkpoint.model_type,
        inputs.tokenizer,
        template,
        server.tool_call_parser,
        server.reasoning_parser,
    )
    images = launch.checkpoint.images
    encoder = ChatEncoder(
        template,
        inputs,
        server.allow_control_tokens_in_content,
        ("", "") if images is None else (images.template_text, images.prompt_text),
    )
    return ChatFormat(encoder, reply_format)


def _encoder(inputs: InputProcessor, server: ServerConfig, default_max_tokens: int) -> PromptEncoder:
    return PromptEncoder(inputs, server.default_max_tokens or default_max_tokens)


def _add_status_page(app: web.Application, launch: FrontendLaunch) -> None:
    feed = StatusFeed(
        launch,
        app[keys.MODELS].name,
        app[keys.CLIENT],
        app[keys.SHARED_METRICS],
        app[keys.LIFECYCLE],
    )
    app[keys.STATUS] = feed
    app.add_routes(page.routes())
    app.add_routes(status.routes)
    app.cleanup_ctx.append(_status_feed)
    app.on_shutdown.append(_close_status_feed)


def _max_body_bytes(launch: FrontendLaunch) -> int:
    """As configured, else enough for the longest prompt in any common text."""
    longest = launch.config.model.max_model_len or launch.checkpoint.max_model_len
    least = HttpLimits.max_body_bytes if launch.checkpoint.images is None else _BODY_WITH_IMAGES
    return launch.server.max_body_bytes or max(least, longest * _BYTES_PER_TOKEN)


def _client_settings(launch: FrontendLaunch, limits: HttpLimits) -> ClientSettings:
    config = launch.config
    running = config.scheduler.max_num_seqs
    assert running is not None, "the configuration was not resolved"
    return ClientSettings(
        num_ranks=config.parallel.data_parallel_size,
        max_num_seqs=running,
        max_queued=launch.server.max_queued_requests,
        index=launch.index,
        num_frontends=launch.num_frontends,
        hang_timeout=config.reliability.hang_timeout,
        max_output_bytes=limits.max_output_memory or default_output_memory(launch.num_frontends),
        max_replays=config.reliability.max_replays,
        engines_end_together=config.parallel.lockstep,
        prefill_engines=config.parallel.prefill_engines,
        prefill_min_tokens=config.parallel.prefill_min_tokens,
        block_tokens=config.block_tokens,
        max_queue_s=config.scheduler.max_queue_time,
        life=launch.first_life + launch.life,
        orphan_grace=config.reliability.orphan_grace,
        stream_dir=f"{launch.run_dir}/streams" if launch.run_dir else "",
    )


async def _close_while_draining(request: web.Request, response: web.StreamResponse) -> None:
    """Send `Connection: close`, so that clients send no further request on this connection."""
    lifecycle = request.app[keys.LIFECYCLE]
    if lifecycle.is_draining or lifecycle.left.is_set():
        response.force_close()
        response.headers["Connection"] = "close"  # aiohttp has written its own headers before


async def start(
    app: web.Application, listener: socket.socket, patience_s: float | None = 0.0
) -> web.AppRunner:
    """Serve `app` on the bound socket `listener` until `cleanup` of the returned runner.

    Connections wait in the socket until the engines have started, for `patience_s` at most; None: no limit.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a disconnect aborts the client's requests
        shutdown_timeout=_CLEANUP_DEADLINE_S,
    )
    await runner.setup()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(app[keys.CLIENT].engines.wait_started(), patience_s)

    def public(listening: socket.socket) -> Listener:
        return Listener(runner, listening, app[keys.LIMITS], app[keys.METRICS], app[keys.TLS])

    await app[keys.LIFECYCLE].listen(listener, public)
    app[keys.OTHER_SOCKETS].start(public)
    return runner


async def _engine_links(app: web.Application) -> AsyncIterator[None]:
    launch = app[keys.LAUNCH]
    client = app[keys.CLIENT]
    moves: list[asyncio.Task[None]] = []
    async with client:
        if not launch.control:
            yield
            return

        def update(message: Engines) -> None:
            client.set_engines(message.engines, message.ended, message.trial)
            _apply(app, message.state)
            app[keys.OTHER_SOCKETS].set_down([] if message.is_leaving else message.down)
            if message.is_leaving != client.resumption.is_leaving:
                client.resumption.is_leaving = message.is_leaving
                moves.append(asyncio.create_task(_leave(app) if message.is_leaving else _come_back(app)))

        async with _running(app[keys.SUPERVISOR].follow(update)):
            yield


async def _close_sockets(app: web.Application) -> None:
    await app[keys.OTHER_SOCKETS].stop()
    app[keys.LIFECYCLE].close()


async def _leave(app: web.Application) -> None:
    """Stop to accept connections: another server has the listening sockets."""
    if keys.STATUS in app:
        await _close_status_feed(app)
    await app[keys.LIFECYCLE].leave()


async def _come_back(app: web.Application) -> None:
    """Accept connections again: the server that had the listening sockets has died."""
    if keys.STATUS in app:
        app[keys.STATUS].open()
    try:
        await app[keys.LIFECYCLE].come_back()
    except Exception:  # no connection would be accepted: the supervisor starts this frontend again
        get_logger().critical("the frontend cannot accept connections again", exc_info=True)
        os._exit(1)


def _apply(app: web.Application, state: ServerState) -> None:
    set_log_level(state.log_level)
    app[keys.CLIENT].control.log_level = state.log_level
    app[keys.LIFECYCLE].set_draining(state.draining)


async def _admin_server(app: web.Application) -> AsyncIterator[None]:
    descriptor = app[keys.LAUNCH].admin_fd
    if descriptor is None:
        yield
        return
    runner = web.AppRunner(
        create_admin_app(app), handler_cancellation=True, shutdown_timeout=_CLEANUP_DEADLINE_S
    )
    await runner.setup()

    def private(listening: socket.socket) -> Listener:
        return Listener(runner, listening, app[keys.LIMITS], app[keys.METRICS])

    await app[keys.LIFECYCLE].listen(socket.socket(fileno=descriptor), private)
    yield
    await runner.cleanup()


async def _status_feed(app: web.Application) -> AsyncIterator[None]:
    async with _running(app[keys.STATUS].run()):
        yield


async def _close_status_feed(app: web.Application) -> None:
    app[keys.STATUS].close()


async def _metrics_file(app: web.Application) -> AsyncIterator[None]:
    async with _running(app[keys.SHARED_METRICS].keep()):
        yield


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """A task for the duration of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _loop_watch(app: web.Application) -> AsyncIterator[None]:
    async with _running(watch_loop(app[keys.METRICS].event_loop_lag.observe)):
        yield


async def _certificate_watch(app: web.Application) -> AsyncIterator[None]:
    if (context := app[keys.TLS]) is None:
        yield
        return
    async with _running(follow_files(context, app[keys.LAUNCH].server)):
        yield


async def _close_tracing(tracing: Tracing | None) -> AsyncIterator[None]:
    yield
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


async def _shut_down(
    executor: TextExecutor, grammars: GrammarCompiler, images: PromptImages | None
) -> AsyncIterator[None]:
    yield
    executor.shutdown()
    grammars.close()
    if images is not None:
        images.close()
