"""Generation requests of both endpoints: check, tokenize, run, respond.

Subclasses define the schema, the prompts, and the form of choices and chunks.
"""

import contextlib
import copy
import dataclasses
import secrets
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from atom.messages.engine import AddRequest
from atom.sampling_params import SamplingParams
from frontend.detokenizer import decode
from frontend.engine_client import EngineClient
from frontend.errors import EngineError, RequestError
from frontend.input_processor import MAX_EXCESS_TOKENS, CheckedParams, InputProcessor
from frontend.output_processor import TextOptions, Update
from frontend.reply_formats.base import call_characters
from frontend.schemas.fields import Schema
from frontend.schemas.generation import GenerationRequest, Usage
from frontend.serving.caller import Caller
from frontend.serving.generate_request import GenerateRequest, ResponseOptions
from frontend.serving.logprobs import TokenFormatter
from frontend.serving.models import ModelService
from frontend.serving.prompts import Prompt, given_id, kept_tokens, salt, text_offsets
from frontend.serving.sampling import requested_max_tokens, sampling_params, stop_strings
from frontend.serving.sse import DONE, ChunkHeader, ChunkTemplate
from frontend.serving.usage import UsageCounter
from frontend.streams import Stream
from frontend.text_executor import TextExecutor
from frontend.token_logprobs import TokenLogprob

__all__ = ["GenerationService", "ServingOptions", "check_choices", "check_prompt_tokens"]

R = TypeVar("R", bound=GenerationRequest)

MAX_CHOICES = 1024
# Prompt logprobs of one request, top tokens included: some hundred MB while a response is encoded.
MAX_PROMPT_LOGPROBS = 1 << 20
# `allowed_token_ids` of all sequences of a request: 64 MiB in messages.
MAX_ALLOWED_IDS = 1 << 24
# All prompts of a request: some hundred MB while it is prepared.
MAX_PROMPT_TOKENS = 1 << 21
# `bad_words` of all sequences of a request, as token ids.
MAX_BAD_WORD_IDS = 1 << 20
# What one token, and one token with log probabilities, take in a response, for choosing a thread.
_TOKEN_BYTES = 8
_LOGPROB_BYTES = 256


@dataclass(frozen=True)
class ServingOptions:
    """Settings of the server and the checkpoint."""

    default_sampling: dict[str, float | int]
    default_max_tokens: int | None
    lenient_fields: bool
    has_tokenizer: bool
    fingerprint: str
    """Equal for two servers that generate the same responses."""


class GenerationService(ABC, Generic[R]):
    """Serves one kind of request body."""

    schema: ClassVar[Schema[Any]]
    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        client: EngineClient,
        inputs: InputProcessor,
        models: ModelService,
        options: ServingOptions,
        executor: TextExecutor,
    ):
        self._client = client
        self._inputs = inputs
        self._models = models
        self._options = options
        self._executor = executor

    async def prepare(self, body: bytes, caller: Caller = Caller()) -> GenerateRequest:  # noqa: B008 (it is frozen)
        """Check and tokenize a request. Raises ApiError; the engine is not involved yet."""
        started = time.monotonic()
        self._client.check_ready()
        request, params, cache_salt = await self._executor.run(
            len(body), lambda: self._check(body, caller, started)
        )
        self._client.check_ready(request.data_parallel_rank)
        # The ids of one request are consecutive, since only the event loop allocates them.
        ids = self._client.new_ids(request.n * len(request.prompts))
        requests = await self._executor.run(
            len(body) // 8, lambda: self._requests(request, params, ids, cache_salt)
        )
        named = [msgspec.structs.replace(one, name=request.id, tenant=caller.tenant) for one in requests]
        return dataclasses.replace(request, requests=named)

    async def respond(self, request: GenerateRequest) -> bytes:
        """The complete response as JSON. Cancelling aborts the generation."""
        counter = request.usage_counter()
        results = [Update(request_id, array("i")) for request_id in request.request_ids]
        async with self._open(request, every_step=False) as stream:
            async for updates in stream:
                for update in updates:
                    _raise_error(update)
                    index = request.index(update)
                    counter.add(index, request.visible(update))
                    results[index] = update  # the only one: see `every_step`
            usage = counter.usage(stream)
            return await self._executor.run(
                sum(map(_response_bytes, results)),
                lambda: msgspec.json.encode(self._response(request, results, usage)),
            )

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. Closing the generator aborts the generation.

        Raises ApiError when the generation fails.
        """
        template = self._template(request)
        counter = request.usage_counter()
        async with self._open(request) as stream:
            async for updates in stream:
                size = sum(map(_response_bytes, updates)) + self._first_bytes(request, counter, updates)
                render = partial(self._render, template, request, counter, updates, stream)
                if frames := await self._executor.run(size, render):
                    yield frames
        if request.include_usage:
            yield template.usage(counter.usage(stream))
        yield DONE

    @abstractmethod
    def _prompts(self, request: R, warnings: list[str]) -> list[Prompt]:
        """All prompts; runs in a thread, and may append to `warnings`."""

    @abstractmethod
    def _default_max_tokens(self) -> int:
        """max_tokens if neither the request nor the command line sets it."""

    @abstractmethod
    def _top_logprobs(self, request: R) -> int | None:
        """Number of top tokens per generated token; None: no log probabilities."""

    @abstractmethod
    def _response(self, request: GenerateRequest, results: list[Update], usage: Usage) -> msgspec.Struct:
        """The body of a non-streaming response."""

    @abstractmethod
    def _delta(self, update: Update) -> dict[str, Any]:
        """The part of a chunk's choice that contains the new text."""

    @abstractmethod
    def _logprobs(
        self, request: GenerateRequest, index: int, entries: Sequence[TokenLogprob]
    ) -> msgspec.Struct:
        """Log probabilities of tokens of choice `index`."""

    @abstractmethod
    def _first_frame(
        self,
        template: ChunkTemplate,
        request: GenerateRequest,
        index: int,
        update: Update,
        usage: Usage | None,
    ) -> bytes:
        """The frame before the first text of choice `index`; `update` is its first one."""

    def _scores_only(self, request: R) -> bool:
        """Whether only prompt logprobs are wanted: `echo` with max_tokens 0."""
        return False

    def _shows_reasoning(self, request: R) -> bool:
        """Whether reasoning is part of the response."""
        return True

    def _check(
        self, body: bytes, caller: Caller, started: float
    ) -> tuple[GenerateRequest, list[SamplingParams], str]:
        """(the request without engine requests, parameters per prompt, cache salt)."""
        request, warnings = self.schema.decode(body, self._options.lenient_fields)
        self._models.check(request.model)
        options = self._response_options(request)
        name = given_id(request, caller) or secrets.token_hex(16)
        cache_salt = salt(request.cache_salt, caller)
        prompts, params = self._read(request, options, warnings)
        prediction = request.prediction
        checked = GenerateRequest(
            id=self.id_prefix + name,
            created=int(time.time()),
            requests=[],
            prompts=prompts,
            text=self._text_options(request, prompts),
            options=options,
            n=params[0].n,
            streaming=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            warnings=warnings,
            started=started,
            data_parallel_rank=_first_given(request.data_parallel_rank, caller.data_parallel_rank),
            prediction_ids=() if prediction is None else self._inputs.prediction_ids(prediction.text),
        )
        return checked, params, cache_salt

    def _open(
        self, request: GenerateRequest, every_step: bool = True
    ) -> contextlib.AbstractAsyncContextManager[Stream]:
        return self._client.open(request.requests, request.text, every_step, request.data_parallel_rank)

    def _first_bytes(self, request: GenerateRequest, counter: UsageCounter, updates: list[Update]) -> int:
        """About how many bytes of the next frames show prompts."""
        if not (request.options.echo or request.options.prompt_ids):
            return 0
        first = [index for update in updates if counter.is_first(index := request.index(update))]
        return sum(_TOKEN_BYTES * len(request.prompt(index).ids) for index in first)

    def _encode(self, request: R, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a prompt; only a prompt to be truncated may exceed the context length."""
        excess = 0 if request.truncate_prompt_tokens is None else MAX_EXCESS_TOKENS
        return self._inputs.encode(text, add_special_tokens, excess)

    def _kept_tokens(self, request: R) -> int | None:
        """How many prompt tokens `truncate_prompt_tokens` keeps; None without truncation."""
        max_tokens, max_model_len = requested_max_tokens(request), self._inputs.max_model_len
        if max_tokens is None:  # a default never takes more than half of the context
            max_tokens = min(self._default_limit(), max_model_len // 2)
        return kept_tokens(request, max_model_len, max_tokens)

    def _template(self, request: GenerateRequest) -> ChunkTemplate:
        header = ChunkHeader(
            id=request.id,
            object=self.chunk_object,
            created=request.created,
            model=self._models.name,
            fingerprint=self._options.fingerprint,
            warnings=request.warnings,
            include_usage=request.include_usage,
        )
        return ChunkTemplate(header, len(request.request_ids), self._delta)

    def _render(
        self,
        template: ChunkTemplate,
        request: GenerateRequest,
        counter: UsageCounter,
        updates: list[Update],
        stream: Stream,
    ) -> bytes:
        """All frames of `updates`, for one write."""
        frames, options, details = [], request.options, request.options.details
        for update in updates:
            _raise_error(update)
            index = request.index(update)
            if counter.is_first(index):
                usage = counter.usage(stream) if options.continuous_usage else None
                frames.append(self._first_frame(template, request, index, update, usage))
            counter.add(index, request.visible(update))
            if details:
                usage = counter.usage(stream) if options.continuous_usage else None
                frames.append(self._detailed_frame(template, request, index, update, usage))
            elif update.finished or update.reasoning or update.calls:
                frames.append(template.update(index, update))
            elif update.text:
                frames.append(template.text(index, update.text))
        return b"".join(frames)

    def _detailed_frame(
        self,
        template: ChunkTemplate,
        request: GenerateRequest,
        index: int,
        update: Update,
        usage: Usage | None,
    ) -> bytes:
        """A chunk with more than text; empty if `update` has nothing to show."""
        shows_ids = bool(request.options.token_ids and update.token_ids)
        shows_text = update.text or update.reasoning or update.calls
        if not (update.finished or shows_text or update.logprobs or shows_ids):
            return b""
        choice = template.choice(index, update)
        if update.logprobs:
            choice["logprobs"] = self._logprobs(request, index, update.logprobs)
        if request.options.token_ids:
            choice["token_ids"] = update.token_ids.tolist()
        return template.frame([choice], usage)

    def _text_options(self, request: R, prompts: Sequence[Prompt]) -> TextOptions:
        """How the text of the replies to `prompts` is made."""
        stops = stop_strings(request.stop)
        if stops and not self._options.has_tokenizer:
            raise RequestError("this model has no tokenizer: use 'stop_token_ids'", param="stop")
        skip_special = request.skip_special_tokens is not False
        return TextOptions(stops, bool(request.include_stop_str_in_output), skip_special)

    def _response_options(self, request: R) -> ResponseOptions:
        _check_stream_options(request)
        has_tokenizer = self._options.has_tokenizer
        if request.echo and not has_tokenizer:
            raise RequestError("'echo' needs a tokenizer, and this model has none", param="echo")
        return ResponseOptions(
            tokens=TokenFormatter(self._inputs.tokenizer, bool(request.return_tokens_as_token_ids)),
            logprobs=self._top_logprobs(request),
            prompt_logprobs=_prompt_logprobs(request),
            echo=bool(request.echo),
            token_ids=bool(request.return_token_ids) or not has_tokenizer,
            prompt_ids=bool(request.return_token_ids),
            score_only=self._scores_only(request),
            continuous_usage=bool(request.stream_options and request.stream_options.continuous_usage_stats),
            reasoning=self._shows_reasoning(request),
        )

    def _read(
        self, request: R, options: ResponseOptions, warnings: list[str]
    ) -> tuple[list[Prompt], list[SamplingParams]]:
        """The checked prompts with their parameters, which differ in max_tokens only."""
        prompts = self._prompts(request, warnings)
        for prompt in prompts:
            self._inputs.check_prompt(prompt.ids)
        params = self._params(request, options, prompts)
        _check_amounts(prompts, params[0], options)
        if options.echo:
            prompts = [self._with_echo(request, options, prompt) for prompt in prompts]
        return prompts, params

    def _with_echo(self, request: R, options: ResponseOptions, prompt: Prompt) -> Prompt:
        tokenizer, skip_special = self._inputs.tokenizer, request.skip_special_tokens is not False
        assert tokenizer is not None  # `_response_options` refuses echo without one
        echo = decode(tokenizer, prompt.ids, skip_special) if prompt.echo is None else prompt.echo
        has_logprobs = options.logprobs is not None
        offsets = text_offsets(tokenizer, prompt.ids, skip_special) if has_logprobs else ()
        return dataclasses.replace(prompt, echo=echo, offsets=offsets)

    def _params(self, request: R, options: ResponseOptions, prompts: list[Prompt]) -> list[SamplingParams]:
        limit = 1 if options.score_only else requested_max_tokens(request)
        if limit is None:
            default = self._default_limit()
            limits = [min(default, self._inputs.room(prompt.ids)) for prompt in prompts]
        else:
            limits = [limit] * len(prompts)
        # Checked once, with the smallest max_tokens, since min_tokens must not exceed it.
        params = sampling_params(
            request,
            self._options.default_sampling,
            max_tokens=min(limits),
            logprobs=options.logprobs,
            prompt_logprobs=self._prompt_logprobs(options),
        )
        return [_with_max_tokens(params, limit) for limit in limits]

    def _prompt_logprobs(self, options: ResponseOptions) -> int | None:
        """Number of top tokens per prompt token; None: no prompt logprobs."""
        return options.prompt_logprobs

    def _default_limit(self) -> int:
        return self._options.default_max_tokens or self._default_max_tokens()

    def _requests(
        self, request: GenerateRequest, params: list[SamplingParams], ids: list[int], cache_salt: str
    ) -> list[AddRequest]:
        """The engine's requests: `n` consecutive `ids` for each prompt."""
        checked, n = self._inputs.check_params(params[0]), params[0].n
        _check_bad_words(checked, len(ids))
        requests = []
        for index, (prompt, prompt_params) in enumerate(zip(request.prompts, params, strict=True)):
            request_ids = ids[index * n : (index + 1) * n]
            requests.append(
                self._inputs.request(
                    prompt.ids, prompt_params, request_ids, cache_salt, checked, request.prediction_ids
                )
            )
        return requests


def _first_given(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def check_choices(prompts: int, n: int) -> None:
    """Raises RequestError for too many choices."""
    if n * prompts > MAX_CHOICES:
        raise RequestError(f"{prompts} prompts with n={n} are more than {MAX_CHOICES} choices", param="n")


def check_prompt_tokens(tokens: int, prompts: int) -> None:
    """Raises RequestError for several prompts with too many tokens in all."""
    if prompts > 1 and tokens > MAX_PROMPT_TOKENS:
        raise RequestError(
            f"the {prompts} prompts have {tokens} tokens or more, at most {MAX_PROMPT_TOKENS} are allowed "
            "in one request: send fewer prompts at once",
            param="prompt",
        )


def _with_max_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    if params.max_tokens == max_tokens:
        return params
    own = copy.copy(params)
    own.max_tokens = max_tokens
    return own


def _response_bytes(result: Update) -> int:
    """About how many bytes of a response come from `result`."""
    text = len(result.text) + len(result.reasoning) + call_characters(result.calls)
    return (
        text
        + _TOKEN_BYTES * len(result.token_ids)
        + _LOGPROB_BYTES * (len(result.logprobs) + len(result.prompt_logprobs))
    )


def _check_amounts(prompts: list[Prompt], params: SamplingParams, options: ResponseOptions) -> None:
    """Limits on the whole request. All prompts have the same parameters except max_tokens."""
    n = params.n
    check_choices(len(prompts), n)
    prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    check_prompt_tokens(prompt_tokens, len(prompts))
    tokens = n * prompt_tokens
    if params.prompt_logprobs is not None and tokens * (1 + params.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"{1 + params.prompt_logprobs} log probabilities for each of {tokens} prompt tokens are more "
            f"than {MAX_PROMPT_LOGPROBS}: send fewer prompts at once, or request fewer log probabilities",
            param="logprobs" if options.prompt_logprobs is None else "prompt_logprobs",
        )
    allowed = len(params.allowed_token_ids or ())
    if n * len(prompts) * allowed > MAX_ALLOWED_IDS:
        raise RequestError(
            f"{allowed} allowed ids for each of {n * len(prompts)} choices are more than {MAX_ALLOWED_IDS}",
            param="allowed_token_ids",
        )


def _check_bad_words(checked: CheckedParams, sequences: int) -> None:
    processors = checked.logits_processors
    count = 0 if processors is None else sum(map(len, processors.bad_words))
    if count * sequences > MAX_BAD_WORD_IDS:
        raise RequestError(
            f"{count} ids in bad_words for each of {sequences} choices are more than {MAX_BAD_WORD_IDS}",
            param="bad_words",
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
