"""Reads the bodies of /v1/chat/completions."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

from atom.shared.sampling_params import MAX_LOGPROBS
from frontend.api.chat.conversation import Conversation
from frontend.api.chat.messages import decode_messages
from frontend.api.chat.prompts import ChatPrompts
from frontend.api.chat.renderer import chat_renderer
from frontend.api.chat.schema import CHAT, ChatRequest
from frontend.api.chat.tools import decode_functions
from frontend.api.generation.caller import Caller
from frontend.api.generation.endpoint import ParsedRequest
from frontend.api.generation.prompts import Prompt, PromptEncoder, truncated
from frontend.errors import RequestError
from frontend.text.input_processor import MAX_EXCESS_TOKENS, InputProcessor

__all__ = ["ChatEndpoint", "check_message_count"]


class ChatEndpoint:
    """POST /v1/chat/completions."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    operation: ClassVar[str] = "chat"
    field_names: ClassVar[Mapping[str, str]] = {"prompt": "messages"}

    def __init__(self, inputs: InputProcessor, encoder: PromptEncoder, prompts: ChatPrompts, lenient: bool):
        self._inputs = inputs
        self._encoder = encoder
        self._prompts = prompts
        self._lenient = lenient

    def read(self, body: bytes, caller: Caller) -> ParsedRequest:
        request, warnings = CHAT.decode(body, self._lenient)
        return ParsedRequest(
            fields=request,
            prompts=partial(self._prompt, request, warnings),
            renderer=chat_renderer,
            default_max_tokens=self._encoder.default_max_tokens,
            warnings=warnings,
            logprobs=_top_logprobs(request),
            shows_prompt_once=True,
            reasoning=request.include_reasoning is not False,
        )

    def tokenized_prompt(self, request: ChatRequest) -> Prompt:
        """The prompt of a conversation, which may exceed the context length. Runs in any thread."""
        conversation = self._conversation(request, [])
        return self._prompts.prompt(conversation, [], MAX_EXCESS_TOKENS)

    def _prompt(self, request: ChatRequest, warnings: list[str]) -> list[Prompt]:
        kept = self._encoder.kept_tokens(request)
        conversation = self._conversation(request, warnings)
        prompt = self._prompts.prompt(conversation, warnings, 0 if kept is None else MAX_EXCESS_TOKENS)
        return [replace(prompt, ids=truncated(prompt.ids, kept, request))]

    def _conversation(self, request: ChatRequest, warnings: list[str]) -> Conversation:
        if request.continue_final_message and request.add_generation_prompt:
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true",
                param="continue_final_message",
            )
        if request.messages is not None and request.prompt is not None:
            raise RequestError("'prompt' is an alias of 'messages': send only one of them", param="messages")
        messages = request.messages or request.prompt or []
        check_message_count(len(messages), self._inputs.max_model_len, "messages")
        return Conversation(
            turns=decode_messages(messages, self._lenient, warnings),
            functions=decode_functions(request.tools, self._lenient, warnings),
            tool_choice=request.tool_choice,
            parallel=request.parallel_tool_calls is not False,
            template_kwargs=request.chat_template_kwargs or {},
            effort=request.reasoning_effort,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            add_special_tokens=bool(request.add_special_tokens),
            raw_text=request.skip_special_tokens is False,
        )


def check_message_count(count: int, max_model_len: int, field: str) -> None:
    """Raises RequestError for no messages, or more than the context has tokens."""
    if not count:
        raise RequestError(f"'{field}' must hold at least one message", param=field)
    if count > max_model_len:  # a message has at least one token
        raise RequestError(
            f"{count} messages do not fit into the model's maximum context length of {max_model_len} tokens",
            param=field,
            code="context_length_exceeded",
        )


def _top_logprobs(request: ChatRequest) -> int | None:
    top = request.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"'top_logprobs' must be in [0, {MAX_LOGPROBS}], not {top}", param="top_logprobs")
    if request.logprobs:
        return top
    if top:
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return None
