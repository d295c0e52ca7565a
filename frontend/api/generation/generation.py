"""A prepared request, whatever its endpoint: submit it, and read updates until the end.

`preparation.py` prepares it, and a renderer of its endpoint turns the updates into bytes: see `endpoint.py`.
"""

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from atom.shared.messages.engine import FinishReason
from frontend.api.generation.generate_request import TOKEN_BYTES, GenerateRequest
from frontend.api.generation.prompt_images import PromptImages
from frontend.api.generation.renderer import Renderer
from frontend.api.generation.resumable_events import Position, ResumableEvents
from frontend.api.generation.update_events import raise_error, update_events
from frontend.api.generation.usage import UsageCounter
from frontend.engine_client.admission import AdmissionSlot
from frontend.engine_client.client import EngineClient
from frontend.engine_client.streams import Deadline, Stream
from frontend.metrics.tracing import RequestTrace, Tracing
from frontend.text.output_processor import SequenceOutput
from frontend.text.reply_formats.base import call_characters
from frontend.text.text_executor import INLINE_BYTES, TextExecutor

__all__ = ["Generation"]

_LOGPROB_BYTES = 256
"""About what a token with log probabilities takes in a response, for choosing a thread."""


@dataclass(frozen=True)
class Response:
    """A response in one piece."""

    body: bytes
    server_timing: str
    """The Server-Timing header: durations in milliseconds."""


class EventWriter(Protocol):
    """Writes events to a client without waiting."""

    def can_write(self) -> bool:
        """Whether `write_now` may be called."""

    def write_now(self, frame: bytes) -> None:
        """Write events."""


class Generation:
    """Runs the requests of all endpoints."""

    def __init__(
        self,
        client: EngineClient,
        executor: TextExecutor,
        tracing: Tracing | None = None,
        images: PromptImages | None = None,
    ):
        """`images` is None for a model that takes none."""
        self._client = client
        self._executor = executor
        self._tracing = tracing
        self._images = images

    async def respond(
        self, request: GenerateRequest, renderer: Renderer, slot: AdmissionSlot | None = None
    ) -> Response:
        """The complete response as JSON. Cancelling aborts the generation; `slot` is its reservation."""
        counter = request.usage_counter()
        results = [SequenceOutput(request_id, array("i")) for request_id in request.request_ids]
        shown = request.shown_bytes
        with self._client.output_memory.reserved(shown):
            async with self._open(request, slot, every_step=False) as stream:
                async for updates in stream:
                    for update in updates:
                        raise_error(update)
                        index = request.index(update)
                        counter.count(index, request.visible(update))
                        results[index] = update  # the only one: see `every_step`
                usage = counter.usage(stream)
                body = await self._executor.run(
                    sum(map(_response_bytes, results), shown),
                    lambda: msgspec.json.encode(renderer.response(results, usage)),
                )
                return Response(body, _server_timing(stream))

    async def stream(
        self,
        request: GenerateRequest,
        renderer: Renderer,
        client: EventWriter,
        slot: AdmissionSlot | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. Closing the generator aborts the generation.

        While it waits for updates, events of small ones are written to `client`, whose reader gets the
        events of all others from the generator. Raises ApiError when the generation fails.
        """
        counter = request.usage_counter()
        with contextlib.ExitStack() as prompts:  # until each choice has shown its prompt
            prompts.enter_context(self._client.output_memory.reserved(request.shown_bytes))
            async with self._open(request, slot) as stream:
                if len(request.request_ids) == 1:  # more are joined: one write for each step
                    stream.send_at_once(partial(_send, renderer, request, counter, stream, client))
                if events := renderer.start():
                    yield events
                async for updates in stream:
                    size = sum(map(_response_bytes, updates)) + _first_bytes(request, counter, updates)
                    render = partial(_render, renderer, request, counter, updates, stream)
                    if events := await self._executor.run(size, render):
                        yield events
                    if counter.have_all_started:
                        prompts.close()
        yield renderer.end(counter.usage(stream))

    async def stream_resumable(
        self, request: GenerateRequest, renderer: Renderer, slot: AdmissionSlot | None = None
    ) -> AsyncGenerator[bytes, None]:
        """As `stream`, for a stream that can be resumed: closing it leaves the generation for the grace."""
        async with (
            self._open(request, slot) as stream,
            contextlib.aclosing(self.resumable_events(request, renderer, stream)) as frames,
        ):
            async for events in frames:
                yield events

    async def resumable_events(
        self, request: GenerateRequest, renderer: Renderer, stream: Stream, position: Position | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The events of an open stream that can be resumed, after those that the client has."""
        rendered = ResumableEvents(request, renderer, self._client.output, position or Position())
        if events := rendered.start():
            yield events
        async for updates in stream:
            for piece in rendered.pieces(updates):
                size = TOKEN_BYTES * len(piece.token_ids)
                events = await self._executor.run(size, partial(rendered.render, piece, stream))
                self._client.finish(stream, rendered.take_stopped(), FinishReason.STOP_STRING)
                if events:
                    yield events
        yield rendered.end(stream)

    @contextlib.asynccontextmanager
    async def _open(
        self, request: GenerateRequest, slot: AdmissionSlot | None, every_step: bool = True
    ) -> AsyncIterator[Stream]:
        deadline = None
        if request.timeout_s is not None:
            deadline = Deadline(request.timeout_s, request.started + request.timeout_s)
        opened = self._client.open(
            request.requests, request.text, every_step, request.data_parallel_rank, deadline, slot
        )
        images = self._images
        pixels = sum(each.pixel_bytes for each in request.requests)
        held = contextlib.nullcontext() if images is None else images.held(pixels)
        with held:
            async with opened as stream:
                with self._traced(request, stream):
                    yield stream

    @contextlib.contextmanager
    def _traced(self, request: GenerateRequest, stream: Stream) -> Iterator[None]:
        """A block that reads the stream, at whose end its trace is recorded."""
        if self._tracing is None:
            yield
            return
        error = ""
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError):
            error = "the client has disconnected"
            raise
        except BaseException as raised:
            error = str(raised) or type(raised).__name__
            raise
        finally:
            self._tracing.record(_trace(request, stream, error))


def _render(
    renderer: Renderer,
    request: GenerateRequest,
    counter: UsageCounter,
    updates: list[SequenceOutput],
    stream: Stream,
) -> bytes:
    """All events of `updates`, for one write."""
    return b"".join([update_events(renderer, request, counter, update, stream) for update in updates])


def _send(
    renderer: Renderer,
    request: GenerateRequest,
    counter: UsageCounter,
    stream: Stream,
    client: EventWriter,
    update: SequenceOutput,
) -> bool:
    """Write the events of an update of the only sequence, but not of a first or large one: False."""
    if counter.is_first(0) or not client.can_write() or _response_bytes(update) > INLINE_BYTES:
        return False
    if events := _render(renderer, request, counter, [update], stream):
        client.write_now(events)
    return True


def _first_bytes(request: GenerateRequest, counter: UsageCounter, updates: list[SequenceOutput]) -> int:
    """About how many bytes of the next events show prompts."""
    if not request.shown_bytes:
        return 0
    num_first = sum(counter.is_first(request.index(update)) for update in updates)
    return num_first * request.shown_bytes // len(request.request_ids)


def _response_bytes(result: SequenceOutput) -> int:
    """About how many bytes of a response come from `result`."""
    text = len(result.text) + len(result.reasoning) + call_characters(result.calls)
    return (
        text
        + TOKEN_BYTES * len(result.token_ids)
        + _LOGPROB_BYTES * (len(result.logprobs) + len(result.prompt_logprobs))
    )


def _server_timing(stream: Stream) -> str:
    decode_s = stream.last_token_at - stream.first_token_at
    phases = {"queue": stream.queue_s, "prefill": stream.prefill_s, "decode": decode_s}
    return ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in phases.items())


def _trace(request: GenerateRequest, stream: Stream, error: str) -> RequestTrace:
    return RequestTrace(
        id=request.id,
        model=request.model,
        operation=request.operation,
        context=request.trace,
        started_at=request.started,
        ended_at=time.monotonic(),
        queue_s=stream.queue_s,
        prefill_s=stream.prefill_s,
        first_token_at=stream.first_token_at,
        last_token_at=stream.last_token_at,
        input_tokens=sum(len(prompt.ids) for prompt in request.prompts),
        output_tokens=stream.num_tokens,
        finish_reasons=stream.reasons,
        error=error,
    )
