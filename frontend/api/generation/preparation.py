"""From the body of a request to what the engine runs: check, tokenize, compile the grammar.

An endpoint reads the body (see `endpoint.py`); what is the same for all of them is here.
"""

import asyncio
import copy
import dataclasses
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from atom.shared.messages.engine import AddRequest
from atom.shared.messages.grammar import Grammar
from atom.shared.messages.resume import Resumable
from atom.shared.sampling_params import SamplingParams
from frontend.api.generation.amounts import check_amounts, check_bad_words, check_shown_prompts
from frontend.api.generation.caller import Caller
from frontend.api.generation.endpoint import Endpoint, ParsedRequest
from frontend.api.generation.field_checks import check_stream_options, checked_timeout, prompt_logprobs
from frontend.api.generation.generate_request import TOKEN_BYTES, GenerateRequest, ResponseOptions
from frontend.api.generation.kv_transfer import HandOver, TransferRules
from frontend.api.generation.logprobs import TokenFormatter
from frontend.api.generation.prompt_images import Grids, PromptImages
from frontend.api.generation.prompts import Prompt, given_id, salt, text_offsets
from frontend.api.generation.resumable_events import (
    ResumeForm,
    check_resumable,
    read_form,
    resumable_requests,
    stream_key,
)
from frontend.api.generation.sampling import requested_max_tokens, sampling_params, stop_strings
from frontend.api.generation.structured_output import reply_constraint
from frontend.api.models.service import ModelService
from frontend.api.schemas.generation import GenerationRequest
from frontend.engine_client.client import EngineClient
from frontend.errors import DeadlineError, RequestError
from frontend.text.constraint import Constraint
from frontend.text.detokenizer import decode
from frontend.text.grammar_compiler import GrammarCompiler
from frontend.text.input_processor import InputProcessor, check_size
from frontend.text.output_processor import TextOptions
from frontend.text.text_executor import TextExecutor

N = TypeVar("N", int, float)

__all__ = ["RequestPreparer", "ServingOptions"]


@dataclass(frozen=True)
class ServingOptions:
    """Settings of the server and the checkpoint."""

    default_sampling: dict[str, float | int]
    has_tokenizer: bool
    fingerprint: str
    """Equal for two servers that generate the same responses."""
    transfer: TransferRules = dataclasses.field(default_factory=TransferRules)


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """What a body asks for, checked and tokenized."""

    name: str
    """The request's id without the prefix of its endpoint."""
    model: str
    created: int
    prompts: list[Prompt]
    params: list[SamplingParams]
    """Parameters of each prompt; they differ in max_tokens only."""
    cache_salt: str
    text: TextOptions
    options: ResponseOptions
    data_parallel_rank: int | None
    timeout_s: float | None
    prediction_ids: Sequence[int]
    """The output that the client expects."""
    constraint: Constraint | None
    """What the output must be; None: any text."""
    shown_bytes: int
    """As in GenerateRequest."""
    hand_over: HandOver


class RequestPreparer:
    """Checks and tokenizes the requests of all endpoints."""

    def __init__(
        self,
        client: EngineClient,
        inputs: InputProcessor,
        models: ModelService,
        options: ServingOptions,
        executor: TextExecutor,
        grammars: GrammarCompiler,
        images: PromptImages | None = None,
    ):
        """`images` is None for a model that takes none."""
        self._client = client
        self._inputs = inputs
        self._models = models
        self._options = options
        self._executor = executor
        self._grammars = grammars
        self._images = images

    async def prepare(self, endpoint: Endpoint, body: bytes, caller: Caller) -> GenerateRequest:
        """Check and tokenize a request. Raises ApiError; the engine is not involved yet."""
        started = time.monotonic()
        self._client.check_ready()
        parsed = await self._executor.run(len(body), lambda: endpoint.read(body, caller))
        try:
            return await self._prepare(endpoint, parsed, body, caller, started)
        except RequestError as error:
            error.rename_field(endpoint.field_names)
            raise

    async def _prepare(
        self, endpoint: Endpoint, parsed: ParsedRequest, body: bytes, caller: Caller, started: float
    ) -> GenerateRequest:
        size = len(body)
        if caller.is_resumable:
            check_resumable(parsed, self._client.resumption.grace_s)
        checked = await self._checked(size + parsed.earlier_bytes, parsed, caller, started)
        self._client.check_ready(checked.data_parallel_rank)
        grammar = None
        if checked.constraint is not None:
            grammar = await self._grammar(checked, caller, started, parsed.warnings)
        n = checked.params[0].n
        # The ids of one request are consecutive, since only the event loop allocates them.
        ids = self._client.new_ids(n * len(checked.prompts))
        requests = await self._executor.run(size // 8, lambda: self._requests(checked, ids, grammar))
        request = self._generate_request(endpoint, parsed, checked, requests, caller, started)
        if not caller.is_resumable:
            return request
        form = ResumeForm(
            endpoint=endpoint.id_prefix,
            body=body,
            name=checked.name,
            created=checked.created,
            started=started,
            timeout_s=checked.timeout_s,
            grids=checked.prompts[0].grids,
        )
        key = stream_key(request.id, given_id(parsed.fields, caller))
        own = resumable_requests(request.requests, key, form.encoded())
        return dataclasses.replace(request, requests=own)

    async def restore(self, endpoint: Endpoint, resumable: Resumable, caller: Caller) -> GenerateRequest:
        """The request of a stream that is resumed, as it was prepared first. Raises ApiError."""
        form = read_form(resumable.form)
        size = len(form.body)
        parsed = await self._executor.run(size, lambda: endpoint.read(form.body, caller))
        checked = await self._checked(size, parsed, caller, form.started, form.grids)
        checked = dataclasses.replace(checked, name=form.name, created=form.created, timeout_s=form.timeout_s)
        grammar = None
        if checked.constraint is not None:
            timeless = dataclasses.replace(checked, timeout_s=None)
            grammar = await self._grammar(timeless, caller, form.started, parsed.warnings)
        ids = list(resumable.request_ids)
        requests = await self._executor.run(size // 8, lambda: self._requests(checked, ids, grammar))
        request = self._generate_request(endpoint, parsed, checked, requests, caller, form.started)
        own = [msgspec.structs.replace(each, resumable=resumable) for each in request.requests]
        return dataclasses.replace(request, requests=own)

    def _generate_request(
        self,
        endpoint: Endpoint,
        parsed: ParsedRequest,
        checked: _Checked,
        requests: list[AddRequest],
        caller: Caller,
        started: float,
    ) -> GenerateRequest:
        name = endpoint.id_prefix + checked.name
        return GenerateRequest(
            id=name,
            model=checked.model,
            operation=endpoint.operation,
            fingerprint=self._options.fingerprint,
            created=checked.created,
            requests=[msgspec.structs.replace(each, name=name, **caller.fields) for each in requests],
            prompts=checked.prompts,
            text=checked.text,
            options=checked.options,
            n=checked.params[0].n,
            streaming=bool(parsed.fields.stream),
            warnings=parsed.warnings,
            started=started,
            new_renderer=parsed.renderer,
            data_parallel_rank=checked.data_parallel_rank,
            timeout_s=checked.timeout_s,
            shown_bytes=checked.shown_bytes,
            trace=caller.trace,
        )

    async def _checked(
        self, size: int, parsed: ParsedRequest, caller: Caller, started: float, grids: Grids | None = None
    ) -> _Checked:
        """Check a request of so many bytes, and prepare its images, unless their `grids` are known."""
        checked = await self._executor.run(size, lambda: self._check(parsed, caller))
        if self._images is None or not any(prompt.sources for prompt in checked.prompts):
            return checked
        made = await self._images.prompts(checked.prompts, parsed.fields, checked.timeout_s, started, grids)
        again = dataclasses.replace(parsed, prompts=lambda: made)
        return await self._executor.run(size, lambda: self._check(again, caller))

    def _check(self, parsed: ParsedRequest, caller: Caller) -> _Checked:
        fields = parsed.fields
        model = self._models.check(fields.model)
        options = self._response_options(parsed)
        name = given_id(fields, caller) or secrets.token_hex(16)
        cache_salt = salt(fields.cache_salt, caller)
        prompts, params = self._prompts(parsed, options)
        hand_over = self._options.transfer.hand_over(
            fields, len(prompts), self._inputs.max_model_len, parsed.warnings
        )
        if hand_over.stores_prompt:
            options = dataclasses.replace(options, hands_over=self._options.transfer.tp_size)
        prediction = fields.prediction
        shown = _shown_bytes(parsed, options, prompts, params[0].n)
        memory = self._client.output_memory
        limit = memory.stream_limit if fields.stream else memory.response_limit
        check_shown_prompts(shown, limit, "echo" if options.echo else "return_token_ids")
        return _Checked(
            name=name,
            model=model,
            created=int(time.time()),
            prompts=prompts,
            params=params,
            cache_salt=cache_salt,
            text=self._text_options(fields, prompts),
            options=options,
            data_parallel_rank=_first_given(fields.data_parallel_rank, caller.data_parallel_rank),
            timeout_s=checked_timeout(_first_given(fields.timeout, caller.timeout_s)),
            prediction_ids=() if prediction is None else self._inputs.prediction_ids(prediction.text),
            constraint=None if options.score_only else reply_constraint(fields, prompts[0]),
            shown_bytes=shown,
            hand_over=hand_over,
        )

    def _response_options(self, parsed: ParsedRequest) -> ResponseOptions:
        fields = parsed.fields
        has_tokenizer = self._options.has_tokenizer
        stream_options = fields.stream_options
        check_stream_options(fields)
        if fields.echo and not has_tokenizer:
            raise RequestError("'echo' needs a tokenizer, and this model has none", param="echo")
        return ResponseOptions(
            tokens=TokenFormatter(self._inputs.tokenizer, bool(fields.return_tokens_as_token_ids)),
            logprobs=parsed.logprobs,
            prompt_logprobs=prompt_logprobs(fields),
            echo=bool(fields.echo),
            token_ids=bool(fields.return_token_ids) or not has_tokenizer,
            prompt_ids=bool(fields.return_token_ids),
            score_only=parsed.score_only,
            usage=bool(stream_options and stream_options.include_usage),
            continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
            reasoning=parsed.reasoning,
        )

    def _text_options(self, fields: GenerationRequest, prompts: list[Prompt]) -> TextOptions:
        """How the text of the replies to `prompts` is made."""
        stops = stop_strings(fields.stop)
        if stops and not self._options.has_tokenizer:
            raise RequestError("this model has no tokenizer: use 'stop_token_ids'", param="stop")
        skip_special = fields.skip_special_tokens is not False
        # Only endpoints with one prompt parse replies.
        return TextOptions(stops, bool(fields.include_stop_str_in_output), skip_special, prompts[0].reply)

    def _prompts(
        self, parsed: ParsedRequest, options: ResponseOptions
    ) -> tuple[list[Prompt], list[SamplingParams]]:
        """The checked prompts with their parameters, which differ in max_tokens only."""
        prompts = parsed.prompts()
        for prompt in prompts:
            self._inputs.check_prompt(prompt.ids)
        params = self._params(parsed, options, prompts)
        logprobs_param = "logprobs" if options.prompt_logprobs is None else "prompt_logprobs"
        check_amounts(prompts, params[0], logprobs_param)
        if options.echo:
            prompts = [self._with_echo(parsed.fields, options, prompt) for prompt in prompts]
        return prompts, params

    def _with_echo(self, fields: GenerationRequest, options: ResponseOptions, prompt: Prompt) -> Prompt:
        tokenizer = self._inputs.tokenizer
        skip_special = fields.skip_special_tokens is not False
        assert tokenizer is not None  # `_response_options` refuses echo without one
        echo = decode(tokenizer, prompt.ids, skip_special) if prompt.echo is None else prompt.echo
        has_logprobs = options.logprobs is not None
        offsets = text_offsets(tokenizer, prompt.ids, skip_special) if has_logprobs else ()
        return dataclasses.replace(prompt, echo=echo, offsets=offsets)

    def _params(
        self, parsed: ParsedRequest, options: ResponseOptions, prompts: list[Prompt]
    ) -> list[SamplingParams]:
        limit = 1 if options.score_only else requested_max_tokens(parsed.fields)
        if limit is None:
            limits = [min(parsed.default_max_tokens, self._inputs.room(prompt.ids)) for prompt in prompts]
        else:
            limits = [limit] * len(prompts)
        echoed = options.logprobs if options.echo and parsed.echo_logprobs else None
        counts = [count for count in (options.prompt_logprobs, echoed) if count is not None]
        # Checked once, with the smallest max_tokens, since min_tokens must not exceed it.
        params = sampling_params(
            parsed.fields,
            self._options.default_sampling,
            max_tokens=min(limits),
            logprobs=options.logprobs,
            prompt_logprobs=max(counts, default=None),
        )
        return [_with_max_tokens(params, limit) for limit in limits]

    async def _grammar(
        self, checked: _Checked, caller: Caller, started: float, warnings: list[str]
    ) -> Grammar:
        """The compiled grammar of the outputs; adds what it does not enforce to `warnings`.

        Raises RequestError for a constraint that cannot be met, DeadlineError if compiling takes too long.
        """
        assert checked.constraint is not None
        row = self._inputs.row_grammar(checked.constraint, checked.params[0], checked.prompts[0].reasoning)
        timeout_s = checked.timeout_s
        left_s = None if timeout_s is None else started + timeout_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                compiled = await self._grammars.compile(checked.constraint, caller.tenant)
        except TimeoutError:
            assert timeout_s is not None
            raise DeadlineError(timeout_s) from None
        warnings += compiled.warnings
        return self._grammars.live.grammar(row, compiled)

    def _requests(self, checked: _Checked, ids: list[int], grammar: Grammar | None) -> list[AddRequest]:
        """The engine's requests: `n` consecutive `ids` for each prompt."""
        n = checked.params[0].n
        shared = self._inputs.check_params(checked.params[0], grammar)
        check_bad_words(shared, len(ids))
        requests = []
        for index, (prompt, params) in enumerate(zip(checked.prompts, checked.params, strict=True)):
            request = self._inputs.request(
                prompt.ids,
                params,
                request_ids=ids[index * n : (index + 1) * n],
                cache_salt=checked.cache_salt,
                checked=shared,
                prediction_ids=checked.prediction_ids,
                images=prompt.images,
            )
            hand_over = checked.hand_over
            if hand_over != HandOver():
                request = msgspec.structs.replace(
                    request, stores_prompt=hand_over.stores_prompt, leased=hand_over.leased
                )
                check_size(request)
            requests.append(request)
        return requests


def _shown_bytes(parsed: ParsedRequest, options: ResponseOptions, prompts: list[Prompt], n: int) -> int:
    """About how many bytes of a response show prompts."""
    size = 0
    if options.echo:
        size += n * sum(len(msgspec.json.encode(prompt.echo)) for prompt in prompts)
    if options.prompt_ids:
        is_once = parsed.shows_prompt_once and not parsed.fields.stream
        size += (1 if is_once else n) * TOKEN_BYTES * sum(len(prompt.ids) for prompt in prompts)
    return size


def _first_given(*values: N | None) -> N | None:
    return next((value for value in values if value is not None), None)


def _with_max_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    if params.max_tokens == max_tokens:
        return params
    own = copy.copy(params)
    own.max_tokens = max_tokens
    return own
