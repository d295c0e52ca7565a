"""Reads the bodies of /v1/responses and /v1/responses/input_tokens."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import msgspec

from frontend.api.chat.conversation import Conversation
from frontend.api.chat.endpoint import check_message_count
from frontend.api.chat.prompts import ChatPrompts
from frontend.api.generation.caller import Caller
from frontend.api.generation.endpoint import ParsedRequest
from frontend.api.generation.prompts import Prompt, PromptEncoder
from frontend.api.models.service import ModelService
from frontend.api.responses.input import ItemReader, tool_choice
from frontend.api.responses.item_references import ItemReferences
from frontend.api.responses.renderer import ResponseEcho, ResponsesRenderer
from frontend.api.responses.response_store import ResponseStore, joined_lists
from frontend.api.responses.schema import (
    INPUT_TOKENS,
    RESPONSES,
    InputTokensRequest,
    ResponsesRequest,
)
from frontend.api.schemas.generation import GenerationRequest
from frontend.api.schemas.structured_output import RESPONSE_FORMAT, ResponseFormat
from frontend.errors import RequestError
from frontend.text.input_processor import MAX_EXCESS_TOKENS, InputProcessor

__all__ = ["ResponsesEndpoint"]

_SAME_NAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "stream_options",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "priority",
    "data_parallel_rank",
    "cache_salt",
    "request_id",
)
_REASONING = "reasoning.encrypted_content"
# Of tools that run on OpenAI's servers, and of images: no output has any of it.
_NEUTRAL_INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

_encode = msgspec.json.Encoder().encode
_items = msgspec.json.Decoder(list[msgspec.Raw])


class ResponsesEndpoint:
    """POST /v1/responses and /v1/responses/input_tokens."""

    id_prefix: ClassVar[str] = "resp_"
    operation: ClassVar[str] = "chat"
    field_names: ClassVar[Mapping[str, str]] = {
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "tool_choice.allowed_tools": "tool_choice",
    }

    def __init__(
        self,
        inputs: InputProcessor,
        encoder: PromptEncoder,
        prompts: ChatPrompts,
        models: ModelService,
        store: ResponseStore,
        max_bytes: int,
        lenient: bool,
    ):
        """`max_bytes` is the limit of a conversation, with what the request refers to."""
        self._inputs = inputs
        self._encoder = encoder
        self._prompts = prompts
        self._models = models
        self._store = store
        self._max_bytes = max_bytes
        self._lenient = lenient

    def read(self, body: bytes, caller: Caller) -> ParsedRequest:
        request, warnings = RESPONSES.decode(body, self._lenient)
        fields = GenerationRequest(**{name: getattr(request, name) for name in _SAME_NAME})
        fields.max_tokens = request.max_output_tokens
        fields.response_format = _response_format(request)
        earlier = self._earlier(request, caller.tenant)
        given = _given_items(request.input)
        references = ItemReferences(given, self._store, caller.tenant)
        keeps = request.store is not False and self._store.is_on
        echo = _echo(request, keeps)
        if keeps:
            echo.keep = partial(self._store.put, caller.tenant)
        return ParsedRequest(
            fields=fields,
            prompts=partial(self._prompt, request, echo, earlier, references, warnings),
            renderer=partial(ResponsesRenderer, echo=echo),
            default_max_tokens=self._encoder.default_max_tokens,
            earlier_bytes=(len(earlier) if request.previous_response_id else 0) + references.size,
            warnings=warnings,
        )

    def counted_prompt(self, body: bytes, tenant: str) -> Prompt:
        """The prompt of a body of input_tokens; runs in any thread. Raises RequestError."""
        request, warnings = INPUT_TOKENS.decode(body, self._lenient)
        self._models.check(request.model)
        _response_format(request)  # raises for one of another type; it does not change the prompt
        earlier = self._earlier(request, tenant)
        given = ItemReferences(_given_items(request.input), self._store, tenant).resolved()
        conversation = self._conversation(request, earlier, given, ItemReader(self._lenient, warnings, set()))
        return self._prompts.prompt(conversation, warnings, MAX_EXCESS_TOKENS)

    def _prompt(
        self,
        request: ResponsesRequest,
        echo: ResponseEcho,
        earlier: bytes,
        references: ItemReferences,
        warnings: list[str],
    ) -> list[Prompt]:
        given = references.resolved()
        reader = ItemReader(self._lenient, warnings, echo.custom_tools)
        conversation = self._conversation(request, earlier, given, reader)
        if echo.keep is not None:
            echo.items = joined_lists(earlier, _encode(given))
        return [self._prompts.prompt(conversation, warnings)]

    def _conversation(
        self,
        request: InputTokensRequest,
        earlier: bytes,
        given: Sequence[msgspec.Raw],
        reader: ItemReader,
    ) -> Conversation:
        earlier_items = _items.decode(earlier)
        count = len(earlier_items) + len(given) + bool(request.instructions)
        check_message_count(count, self._inputs.max_model_len, "input")
        self._check_size(len(earlier) + sum(len(memoryview(raw)) for raw in given))
        named = itertools.chain(
            (("previous_response_id.", raw) for raw in earlier_items),
            ((f"input[{index}].", raw) for index, raw in enumerate(given)),
        )
        return Conversation(
            turns=reader.turns(request.instructions, named),
            functions=reader.functions(request.tools or ()),
            tool_choice=tool_choice(request.tool_choice),
            parallel=request.parallel_tool_calls is not False,
            effort=None if request.reasoning is None else request.reasoning.effort,
        )

    def _earlier(self, request: InputTokensRequest, tenant: str) -> bytes:
        """The items of the conversation that `previous_response_id` names, as a JSON list."""
        if request.previous_response_id is None:
            return b"[]"
        return self._store.get(tenant, request.previous_response_id, "previous_response_id").items

    def _check_size(self, size: int) -> None:
        """Raises RequestError for a conversation that would be refused as one body: a reference is short."""
        if size > self._max_bytes:
            raise RequestError(
                f"the conversation has {size} bytes with the stored items, at most {self._max_bytes} are "
                "allowed: leave out earlier items, or name each stored item once",
                param="input",
                status=413,
            )


def _given_items(given: str | list[msgspec.Raw] | None) -> list[msgspec.Raw]:
    if isinstance(given, str):
        return [msgspec.Raw(_encode({"type": "message", "role": "user", "content": given}))]
    return given or []


def _echo(request: ResponsesRequest, keeps: bool) -> ResponseEcho:
    reasoning = request.reasoning
    text = request.text
    return ResponseEcho(
        instructions=msgspec.Raw(_encode(request.instructions)),
        max_output_tokens=request.max_output_tokens,
        metadata=msgspec.Raw(_encode(request.metadata or {})),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        effort=None if reasoning is None else reasoning.effort,
        store=keeps,
        temperature=request.temperature,
        text=msgspec.Raw(_encode({"format": (text and text.format) or {"type": "text"}})),
        tool_choice=msgspec.Raw(_encode(request.tool_choice or "auto")),
        tools=msgspec.Raw(_encode(request.tools or [])),
        top_p=request.top_p,
        shows_encrypted=_shows_encrypted(request.include or ()),
    )


def _shows_encrypted(include: Sequence[str]) -> bool:
    for name in include:
        if name != _REASONING and name not in _NEUTRAL_INCLUDES:
            raise RequestError(
                f"'include' has {name!r:.80}, which is not supported: this server takes '{_REASONING}'",
                param="include",
                code="unsupported_parameter",
            )
    return _REASONING in include


def _response_format(request: InputTokensRequest) -> ResponseFormat | None:
    """`text.format` in the form of chat completions, whose json_schema has its fields one level deeper."""
    given = request.text and request.text.format
    if not given:
        return None
    if given.get("type") == "json_schema":
        given = {
            "type": "json_schema",
            "json_schema": {name: given[name] for name in given if name != "type"},
        }
    try:
        return RESPONSE_FORMAT.decode(_encode(given), lenient=False, where="text.format.")[0]
    except RecursionError:
        raise RequestError("'text.format' is nested too deeply", param="text.format") from None
