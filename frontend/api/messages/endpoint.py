"""Reads the bodies of /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from frontend.api.chat.endpoint import check_message_count
from frontend.api.chat.prompts import ChatPrompts
from frontend.api.generation.caller import Caller
from frontend.api.generation.endpoint import ParsedRequest
from frontend.api.generation.prompts import Prompt
from frontend.api.messages.input import MessagesReader
from frontend.api.messages.renderer import MessagesRenderer
from frontend.api.messages.schema import COUNT, MESSAGES, CountRequest, MessagesRequest
from frontend.api.models.service import ModelService
from frontend.api.schemas.generation import GenerationRequest
from frontend.api.schemas.structured_output import JsonSchemaFormat, ResponseFormat
from frontend.errors import RequestError
from frontend.text.input_processor import MAX_EXCESS_TOKENS, InputProcessor

__all__ = ["MessagesEndpoint"]

_MIN_BUDGET = 1024
_SAME_NAME = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stream",
    "priority",
    "data_parallel_rank",
    "cache_salt",
    "request_id",
)


class MessagesEndpoint:
    """POST /v1/messages and /v1/messages/count_tokens."""

    id_prefix: ClassVar[str] = "msg_"
    operation: ClassVar[str] = "chat"
    field_names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    def __init__(self, inputs: InputProcessor, prompts: ChatPrompts, models: ModelService, lenient: bool):
        self._inputs = inputs
        self._prompts = prompts
        self._models = models
        self._lenient = lenient

    def read(self, body: bytes, caller: Caller) -> ParsedRequest:
        request, warnings = MESSAGES.decode(body, self._lenient)
        _check_budget(request)
        fields = GenerationRequest(**{name: getattr(request, name) for name in _SAME_NAME})
        fields.stop = request.stop_sequences
        if (output := request.output_config) is not None and output.format is not None:
            schema = JsonSchemaFormat(schema=output.format.schema)
            fields.response_format = ResponseFormat("json_schema", json_schema=schema)
        return ParsedRequest(
            fields=fields,
            prompts=partial(self._prompt, request, warnings),
            renderer=MessagesRenderer,
            default_max_tokens=request.max_tokens,
            warnings=warnings,
        )

    def counted_prompt(self, body: bytes) -> Prompt:
        """The prompt of a body of count_tokens; runs in any thread. Raises RequestError."""
        request, warnings = COUNT.decode(body, self._lenient)
        self._models.check(request.model)
        (prompt,) = self._prompt(request, warnings, MAX_EXCESS_TOKENS)
        return prompt

    def _prompt(self, request: CountRequest, warnings: list[str], excess: int = 0) -> list[Prompt]:
        check_message_count(len(request.messages), self._inputs.max_model_len, "messages")
        conversation = MessagesReader(self._lenient, warnings).conversation(request)
        return [self._prompts.prompt(conversation, warnings, excess)]


def _check_budget(request: MessagesRequest) -> None:
    budget = None if request.thinking is None else request.thinking.budget_tokens
    if budget is not None and not _MIN_BUDGET <= budget < request.max_tokens:
        raise RequestError(
            f"'thinking.budget_tokens' must be at least {_MIN_BUDGET} and less than max_tokens "
            f"({request.max_tokens}), not {budget}",
            param="thinking.budget_tokens",
        )
