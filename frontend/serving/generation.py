"""The life of a generation request, whatever its endpoint: check, tokenize, run, count.

An endpoint brings its schema and says how its prompts, choices and chunks look.
"""

import asyncio
import dataclasses
import secrets
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from atom.messages.engine import AddRequest
from atom.sampling_params import SamplingParams
from frontend.engine_client import EngineClient, Stream
from frontend.errors import ApiError, EngineError, RequestError
from frontend.input_processor import InputProcessor
from frontend.output_processor import TextOptions, Update
from frontend.schemas.fields import Schema
from frontend.schemas.generation import GenerationRequest, Usage
from frontend.serving.caller import Caller
from frontend.serving.generate_request import GenerateRequest, ResponseOptions
from frontend.serving.logprobs import TokenNames
from frontend.serving.models import ModelService
from frontend.serving.prompts import Prompt, given_id, salt, text_offsets, truncated
from frontend.serving.sampling import answer_limit, sampling_params, stop_strings
from frontend.serving.sse import DONE, ChunkHeader, ChunkTemplate, error_frame
from frontend.serving.usage import UsageCounter
from frontend.token_logprobs import TokenLogprob

__all__ = ["GenerationService", "ServingOptions"]

R = TypeVar("R", bound=GenerationRequest)
T = TypeVar("T")

MAX_CHOICES = 1024
# Log probabilities of prompts, counted with their alternatives: some hundred MB while an answer is made.
MAX_PROMPT_LOGPROBS = 1 << 20
# Ids that go to the engine with all choices of a request: 64 MiB.
MAX_ALLOWED_IDS = 1 << 24
# Tokenizing this much takes about a millisecond, ten times what a hop to a thread costs.
_INLINE_BYTES = 2048
# What an answer of this many tokens takes to encode is about as long.
_INLINE_LOGPROBS = 256


@dataclass(frozen=True)
class ServingOptions:
    """What the operator chose."""

    default_sampling: dict[str, float | int]
    default_max_tokens: int | None
    lenient_fields: bool
    has_tokenizer: bool
    fingerprint: str
    """Same for two servers that give the same answers."""


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

    async def prepare(self, body: bytes, caller: Caller = Caller()) -> GenerateRequest:  # noqa: B008 (it is frozen)
        """Check and tokenize. Raises ApiError, before the engine hears of the request."""
        started = time.monotonic()
        self._client.check_ready()
        request, warnings = self.schema.decode(body, self._options.lenient_fields)
        self._models.check(request.model)
        text, shown = self._text_options(request), self._shown(request)
        name = given_id(request, caller) or secrets.token_hex(16)
        cache_salt = salt(request.cache_salt, caller)
        prompts = await self._off_loop(len(body), lambda: self._read(request, shown, warnings))
        params = [self._params(request, shown, prompt) for prompt in prompts]
        _check_amounts(prompts, params[0], shown)
        return GenerateRequest(
            id=self.id_prefix + name,
            created=int(time.time()),
            requests=self._requests(prompts, params, cache_salt),
            prompts=prompts,
            text=text,
            shown=shown,
            n=params[0].n,
            streaming=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            warnings=warnings,
            started=started,
        )

    async def answer(self, job: GenerateRequest) -> bytes:
        """The whole reply as JSON. Cancelling aborts the generation."""
        tally = job.tally()
        results = [Update(request.request_id, array("i")) for request in job.requests]
        with self._client.open(job.requests, job.text, every_step=False) as stream:
            async for updates in stream:
                for update in updates:
                    _raise_error(update)
                    index = job.index(update)
                    tally.add(index, job.fit_to_show(update))
                    results[index].merge(update)
        usage = tally.usage(stream)
        size = sum(len(result.logprobs) + len(result.prompt_logprobs) for result in results)
        return await self._off_loop(
            size * _INLINE_BYTES // _INLINE_LOGPROBS,
            lambda: msgspec.json.encode(self._answer(job, results, usage)),
        )

    async def frames(self, job: GenerateRequest) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events. Close it to abort the generation."""
        template = self._template(job)
        tally = job.tally()
        with self._client.open(job.requests, job.text) as stream:
            try:
                async for updates in stream:
                    if frames := self._render(template, job, tally, updates, stream):
                        yield frames
            except ApiError as error:
                yield error_frame(error.body())
                return
        if job.include_usage:
            yield template.usage(tally.usage(stream))
        yield DONE

    @abstractmethod
    def _prompts(self, request: R, warnings: list[str]) -> list[Prompt]:
        """Every prompt; runs in any thread, and may append to `warnings`."""

    @abstractmethod
    def _default_max_tokens(self) -> int:
        """The length of answers where neither request nor operator names one."""

    @abstractmethod
    def _top_logprobs(self, request: R) -> int | None:
        """How many of the most likely tokens to show beside each one; None shows none at all."""

    @abstractmethod
    def _answer(self, job: GenerateRequest, results: list[Update], usage: Usage) -> msgspec.Struct:
        """The body of a reply that is not streamed."""

    @abstractmethod
    def _news(self, update: Update) -> dict[str, Any]:
        """The part of a chunk's choice that holds text."""

    @abstractmethod
    def _logprobs(self, job: GenerateRequest, index: int, entries: Sequence[TokenLogprob]) -> msgspec.Struct:
        """Log probabilities of tokens of one choice."""

    @abstractmethod
    def _first_frame(
        self, template: ChunkTemplate, job: GenerateRequest, index: int, update: Update, usage: Usage | None
    ) -> bytes:
        """What goes before the first text of a choice, whose first tokens `update` brings."""

    def _scores_only(self, request: R) -> bool:
        """Whether the request wants no token generated; only endpoints that show prompts allow it."""
        return False

    def _fit(self, request: R, ids: list[int]) -> list[int]:
        """What the request wants to keep of a prompt."""
        limit, longest = answer_limit(request), self._inputs.max_model_len
        # Without a word about the answer's length, it shall not crowd out the prompt.
        answer = limit if limit is not None else min(self._usual_max_tokens(), longest // 2)
        return truncated(ids, request, longest, answer)

    def _template(self, job: GenerateRequest) -> ChunkTemplate:
        header = ChunkHeader(
            id=job.id,
            object=self.chunk_object,
            created=job.created,
            model=self._models.name,
            fingerprint=self._options.fingerprint,
            warnings=job.warnings,
            include_usage=job.include_usage,
        )
        return ChunkTemplate(header, len(job.requests), self._news)

    def _render(
        self,
        template: ChunkTemplate,
        job: GenerateRequest,
        tally: UsageCounter,
        updates: list[Update],
        stream: Stream,
    ) -> bytes:
        """All frames of one wake-up, for one write."""
        frames, shown, details = [], job.shown, job.shown.details
        for update in updates:
            _raise_error(update)
            index = job.index(update)
            if tally.begins(index):
                usage = tally.usage(stream) if shown.continuous_usage else None
                frames.append(self._first_frame(template, job, index, update, usage))
            tally.add(index, job.fit_to_show(update))
            if details:
                usage = tally.usage(stream) if shown.continuous_usage else None
                frames.append(self._detailed_frame(template, job, index, update, usage))
            elif update.finished or update.reasoning:
                frames.append(template.update(index, update))
            elif update.text:
                frames.append(template.text(index, update.text))
        return b"".join(frames)

    def _detailed_frame(
        self, template: ChunkTemplate, job: GenerateRequest, index: int, update: Update, usage: Usage | None
    ) -> bytes:
        """A chunk with more than text; nothing while there is nothing to tell."""
        shows_ids = bool(job.shown.token_ids and update.token_ids)
        if not (update.finished or update.text or update.reasoning or update.logprobs or shows_ids):
            return b""
        choice = template.choice(index, update)
        if update.logprobs:
            choice["logprobs"] = self._logprobs(job, index, update.logprobs)
        if job.shown.token_ids:
            choice["token_ids"] = update.token_ids.tolist()
        return template.frame([choice], usage)

    def _text_options(self, request: R) -> TextOptions:
        stops = stop_strings(request.stop)
        if stops and not self._options.has_tokenizer:
            raise RequestError("this model has no tokenizer: use 'stop_token_ids'", param="stop")
        skip_special = request.skip_special_tokens is not False
        return TextOptions(stops, bool(request.include_stop_str_in_output), skip_special)

    def _shown(self, request: R) -> ResponseOptions:
        _check_stream_options(request)
        has_tokenizer = self._options.has_tokenizer
        if request.echo and not has_tokenizer:
            raise RequestError("this model has no tokenizer to show the prompt's text with", param="echo")
        return ResponseOptions(
            names=TokenNames(self._inputs.tokenizer, bool(request.return_tokens_as_token_ids)),
            logprobs=self._top_logprobs(request),
            prompt_logprobs=_prompt_logprobs(request),
            echo=bool(request.echo),
            token_ids=bool(request.return_token_ids) or not has_tokenizer,
            prompt_ids=bool(request.return_token_ids),
            score_only=self._scores_only(request),
            continuous_usage=bool(request.stream_options and request.stream_options.continuous_usage_stats),
        )

    def _read(self, request: R, shown: ResponseOptions, warnings: list[str]) -> list[Prompt]:
        prompts = self._prompts(request, warnings)
        for prompt in prompts:
            self._inputs.check_prompt(prompt.ids)
        return [self._echoed(request, shown, prompt) for prompt in prompts] if shown.echo else prompts

    def _echoed(self, request: R, shown: ResponseOptions, prompt: Prompt) -> Prompt:
        tokenizer, skip_special = self._inputs.tokenizer, request.skip_special_tokens is not False
        assert tokenizer is not None  # `_shown` refuses echo without one
        echo = tokenizer.decode(prompt.ids, skip_special) if prompt.echo is None else prompt.echo
        asks = shown.logprobs is not None
        offsets = text_offsets(tokenizer, prompt.ids, skip_special) if asks else ()
        return dataclasses.replace(prompt, echo=echo, offsets=offsets)

    def _params(self, request: R, shown: ResponseOptions, prompt: Prompt) -> SamplingParams:
        limit = 1 if shown.score_only else answer_limit(request)
        if limit is None:
            limit = min(self._usual_max_tokens(), self._inputs.room(prompt.ids))
        return sampling_params(
            request,
            self._options.default_sampling,
            max_tokens=limit,
            logprobs=shown.logprobs,
            prompt_logprobs=self._prompt_logprobs(shown),
        )

    def _prompt_logprobs(self, shown: ResponseOptions) -> int | None:
        """How many log probabilities the engine is asked for at each place of the prompt."""
        return shown.prompt_logprobs

    def _usual_max_tokens(self) -> int:
        return self._options.default_max_tokens or self._default_max_tokens()

    def _requests(
        self, prompts: list[Prompt], params: list[SamplingParams], cache_salt: str
    ) -> list[AddRequest]:
        requests = []
        for prompt, options in zip(prompts, params, strict=True):
            ids = self._client.new_ids(options.n)
            requests += self._inputs.requests(prompt.ids, options, ids, cache_salt)
        return requests

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        if size <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _check_amounts(prompts: list[Prompt], params: SamplingParams, shown: ResponseOptions) -> None:
    """What each field allows may be too much in all. The prompts share all but max_tokens."""
    n = params.n
    if n * len(prompts) > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n={n} are more than {MAX_CHOICES} choices", param="n"
        )
    tokens = n * sum(len(prompt.ids) for prompt in prompts)
    if params.prompt_logprobs is not None and tokens * (1 + params.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"{1 + params.prompt_logprobs} log probabilities for each of {tokens} prompt tokens are more "
            f"than {MAX_PROMPT_LOGPROBS}: send fewer prompts at once, or ask for fewer",
            param="logprobs" if shown.prompt_logprobs is None else "prompt_logprobs",
        )
    allowed = len(params.allowed_token_ids or ())
    if n * len(prompts) * allowed > MAX_ALLOWED_IDS:
        raise RequestError(
            f"{allowed} allowed ids for each of {n * len(prompts)} choices are more than {MAX_ALLOWED_IDS}",
            param="allowed_token_ids",
        )


def _check_stream_options(request: GenerationRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise RequestError("'stream_options' needs 'stream': true", param="stream_options")
    if options.include_obfuscation:
        raise RequestError(
            "'stream_options.include_obfuscation' is not supported: leave it out or send false",
            param="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )


def _prompt_logprobs(request: GenerationRequest) -> int | None:
    count = request.prompt_logprobs
    if count is True:
        raise RequestError("'prompt_logprobs' must be an integer, not true", param="prompt_logprobs")
    if count is None or count is False:
        return None
    if request.stream:
        raise RequestError("'prompt_logprobs' cannot be streamed", param="prompt_logprobs")
    return count


def _raise_error(update: Update) -> None:
    if update.error:
        raise EngineError(update.error, code="engine_error")
