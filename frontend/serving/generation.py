"""The life of a generation request, whatever its endpoint: check, tokenize, run, count.

An endpoint brings its schema and says how its prompts, choices and chunks look.
"""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from atom.messages.engine import AddRequest
from atom.sampling_params import SamplingParams
from frontend.engine_client import EngineClient
from frontend.errors import ApiError, EngineError, RequestError
from frontend.input_processor import InputProcessor
from frontend.output_processor import Update
from frontend.schemas.fields import Schema
from frontend.schemas.generation import GenerationRequest, Usage
from frontend.serving.models import ModelService
from frontend.serving.sampling import sampling_params, stop_strings
from frontend.serving.sse import DONE, ChunkHeader, ChunkTemplate, error_frame
from frontend.serving.usage import Tally

__all__ = ["GenerationService", "Job", "ServingOptions"]

R = TypeVar("R", bound=GenerationRequest)
T = TypeVar("T")

MAX_CHOICES = 1024
# Tokenizing this much takes about a millisecond, ten times what a hop to a thread costs.
_INLINE_BYTES = 2048


@dataclass(frozen=True)
class ServingOptions:
    """What the operator chose."""

    default_sampling: dict[str, float | int]
    default_max_tokens: int | None
    lenient_fields: bool
    has_tokenizer: bool


@dataclass(frozen=True)
class Job:
    """A request that passed every check; `requests[i]` makes choice i."""

    id: str
    created: int
    requests: list[AddRequest]
    stop_strings: list[str]
    n: int
    prompt_tokens: int
    streaming: bool
    include_usage: bool
    warnings: list[str]
    started: float

    def tally(self) -> Tally:
        """A fresh count for this job."""
        return Tally(self.prompt_tokens, len(self.requests), self.n, self.started)

    def index(self, update: Update) -> int:
        """The choice that an update belongs to: ids of one job follow each other."""
        return update.request_id - self.requests[0].request_id


class GenerationService(ABC, Generic[R]):
    """Answers one kind of request body."""

    schema: ClassVar[Schema[Any]]
    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        client: EngineClient,
        inputs: InputProcessor,
        models: ModelService,
        options: ServingOptions,
        threads: ThreadPoolExecutor,
    ):
        self._client = client
        self._inputs = inputs
        self._models = models
        self._options = options
        self._threads = threads

    async def prepare(self, body: bytes) -> Job:
        """Check and tokenize. Raises ApiError, before the engine hears of the request."""
        started = time.monotonic()
        self._client.check_ready()
        request, warnings = self.schema.decode(body, self._options.lenient_fields)
        self._models.check(request.model)
        stops = self._stop_strings(request)
        prompts = await self._off_loop(len(body), lambda: self._prompts(request, warnings))
        params = [self._params(request, prompt) for prompt in prompts]
        n = params[0].n
        if n * len(prompts) > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with n={n} are more than {MAX_CHOICES} choices", param="n"
            )
        return Job(
            id=self.id_prefix + secrets.token_hex(16),
            created=int(time.time()),
            requests=self._requests(prompts, params),
            stop_strings=stops,
            n=n,
            prompt_tokens=sum(map(len, prompts)),
            streaming=bool(request.stream),
            include_usage=_include_usage(request),
            warnings=warnings,
            started=started,
        )

    async def answer(self, job: Job) -> bytes:
        """The whole reply as JSON. Cancelling aborts the generation."""
        tally = job.tally()
        results = [Update(request.request_id, array("i")) for request in job.requests]
        with self._client.open(job.requests, job.stop_strings, every_step=False) as stream:
            async for updates in stream:
                for update in updates:
                    _raise_error(update)
                    index = job.index(update)
                    tally.add(index, update)
                    results[index].merge(update)
        return msgspec.json.encode(self._answer(job, results, tally.usage(stream)))

    async def frames(self, job: Job) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events. Close it to abort the generation."""
        template = self._template(job)
        tally = job.tally()
        with self._client.open(job.requests, job.stop_strings) as stream:
            try:
                async for updates in stream:
                    if frames := self._render(template, job, tally, updates):
                        yield frames
            except ApiError as error:
                yield error_frame(error.body())
                return
        if job.include_usage:
            yield template.usage(tally.usage(stream))
        yield DONE

    @abstractmethod
    def _prompts(self, request: R, warnings: list[str]) -> list[list[int]]:
        """Token ids of every prompt; runs in any thread, and may append to `warnings`."""

    @abstractmethod
    def _default_max_tokens(self) -> int:
        """The length of answers where neither request nor operator names one."""

    @abstractmethod
    def _answer(self, job: Job, results: list[Update], usage: Usage) -> msgspec.Struct:
        """The body of a reply that is not streamed."""

    @abstractmethod
    def _text(self, text: str) -> dict[str, Any]:
        """The part of a chunk's choice that holds text."""

    def _first_frame(self, template: ChunkTemplate, index: int) -> bytes:
        """What goes before the first text of a choice."""
        return b""

    def _template(self, job: Job) -> ChunkTemplate:
        header = ChunkHeader(
            job.id, self.chunk_object, job.created, self._models.name, job.warnings, job.include_usage
        )
        return ChunkTemplate(header, len(job.requests), self._text)

    def _render(self, template: ChunkTemplate, job: Job, tally: Tally, updates: list[Update]) -> bytes:
        """All frames of one wake-up, for one write."""
        frames = []
        for update in updates:
            _raise_error(update)
            index = job.index(update)
            if tally.begins(index):
                frames.append(self._first_frame(template, index))
            tally.add(index, update)
            if not self._options.has_tokenizer:
                frames.append(template.ids(index, update))
            elif update.finished:
                frames.append(template.end(index, update))
            elif update.text:
                frames.append(template.text(index, update.text))
        return b"".join(frames)

    def _stop_strings(self, request: R) -> list[str]:
        stops = stop_strings(request.stop)
        if stops and not self._options.has_tokenizer:
            raise RequestError("this model has no tokenizer: use 'stop_token_ids'", param="stop")
        return stops

    def _params(self, request: R, prompt: list[int]) -> SamplingParams:
        room = self._inputs.room(prompt)
        default = self._options.default_max_tokens or self._default_max_tokens()
        return sampling_params(request, self._options.default_sampling, min(default, room))

    def _requests(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[AddRequest]:
        requests = []
        for prompt, options in zip(prompts, params, strict=True):
            ids = self._client.new_ids(options.n)
            requests += self._inputs.requests(prompt, options, ids)
        return requests

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        if size <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _include_usage(request: GenerationRequest) -> bool:
    options = request.stream_options
    if options is None:
        return False
    if not request.stream:
        raise RequestError("'stream_options' needs 'stream': true", param="stream_options")
    for name in ("include_obfuscation", "continuous_usage_stats"):
        if getattr(options, name):
            raise RequestError(
                f"'stream_options.{name}' is not supported: leave it out or send false",
                param=f"stream_options.{name}",
                code="unsupported_parameter",
            )
    return bool(options.include_usage)


def _raise_error(update: Update) -> None:
    if update.error:
        raise EngineError(update.error, code="engine_error")
