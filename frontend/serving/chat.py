"""Chat completions: the checkpoint's chat template turns messages into a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from atom.sampling_params import MAX_LOGPROBS
from frontend.chat_encoder import ChatEncoder, EncodedChat
from frontend.engine_client import EngineClient
from frontend.errors import RequestError
from frontend.input_processor import MAX_EXCESS_TOKENS, InputProcessor
from frontend.output_processor import TextOptions, Update
from frontend.reply_formats.base import CallDelta, ReplyFormat, ReplyOptions, ReplyParser
from frontend.schemas.chat import (
    CHAT,
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    FunctionCall,
    Reply,
    ToolCall,
)
from frontend.schemas.generation import Usage
from frontend.serving.generate_request import GenerateRequest
from frontend.serving.generation import GenerationService, ServingOptions
from frontend.serving.logprobs import chat_logprobs, prompt_logprobs
from frontend.serving.messages import ASSISTANT, read_messages
from frontend.serving.models import ModelService
from frontend.serving.prompts import Prompt, truncated
from frontend.serving.reasons import openai_reason
from frontend.serving.sse import ChunkTemplate
from frontend.serving.template_options import template_options
from frontend.serving.tools import Tools, read_tools
from frontend.template_source import TemplateSource
from frontend.text_executor import TextExecutor
from frontend.token_logprobs import TokenLogprob

__all__ = ["ChatService"]

_DEFAULT_MAX_TOKENS = 8192


class ChatService(GenerationService[ChatRequest]):
    """POST /v1/chat/completions."""

    schema = CHAT
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        client: EngineClient,
        inputs: InputProcessor,
        models: ModelService,
        options: ServingOptions,
        executor: TextExecutor,
        encoder: ChatEncoder | None,
        reply_format: ReplyFormat | None = None,
    ):
        super().__init__(client, inputs, models, options, executor)
        self._encoder = encoder
        self._format = reply_format

    def prompt_ids(self, request: ChatRequest, add_special_tokens: bool) -> list[int]:
        """Token ids of a conversation, which may exceed the context length. Runs in any thread."""
        request.add_special_tokens = add_special_tokens
        return self._prompt(request, [], MAX_EXCESS_TOKENS).ids

    def _prompts(self, request: ChatRequest, warnings: list[str]) -> list[Prompt]:
        kept = self._kept_tokens(request)
        prompt = self._prompt(request, warnings, 0 if kept is None else MAX_EXCESS_TOKENS)
        return [replace(prompt, ids=truncated(prompt.ids, kept, request))]

    def _prompt(self, request: ChatRequest, warnings: list[str], excess: int) -> Prompt:
        encoder = self._encoder
        if encoder is None:
            raise RequestError(
                "this model has no chat template: put chat_template.jinja into its directory, "
                "or use /v1/completions",
                param="messages",
            )
        if request.continue_final_message and request.add_generation_prompt:
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true",
                param="continue_final_message",
            )
        template, lenient = encoder.template, self._options.lenient_fields
        try:
            messages = self._messages(request, template.source, warnings)
            options = template_options(request, template, self._format, lenient, warnings)
            tools = read_tools(request, template.source, self._format, lenient, warnings)
            encoded = encoder.encode(
                messages,
                options,
                tools=tools.shown,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                add_special_tokens=bool(request.add_special_tokens),
                excess=excess,
            )
        except RecursionError:
            raise RequestError(
                "the messages, tools or template options are nested too deeply", "messages"
            ) from None
        last = messages[-1]
        echo = (last["content"] or "") if last["role"] == ASSISTANT else ""
        return Prompt(encoded.ids, echo, reply=self._reply(request, tools, encoded))

    def _reply(
        self, request: ChatRequest, tools: Tools, encoded: EncodedChat
    ) -> Callable[[], ReplyParser] | None:
        """Makes the parsers of the replies; None if all text is content.

        With special tokens included and no tools, the text is returned as the model wrote it.
        """
        reply_format, raw = self._format, request.skip_special_tokens is False
        if reply_format is None or (raw and not tools.are_called):
            return None
        options = ReplyOptions(
            tools.schemas if tools.are_called else None,
            thinking=reply_format.ends_thinking(encoded.ids, encoded.end),
            parallel=request.parallel_tool_calls is not False,
        )
        return partial(reply_format.parser, options) if reply_format.is_needed(options) else None

    def _messages(
        self, request: ChatRequest, source: TemplateSource, warnings: list[str]
    ) -> list[dict[str, Any]]:
        if request.messages is not None and request.prompt is not None:
            raise RequestError("'prompt' is an alias of 'messages': send only one of them", param="prompt")
        raw_messages, limit = request.messages or request.prompt, self._inputs.max_model_len
        if not raw_messages:
            raise RequestError("'messages' must hold at least one message", param="messages")
        if len(raw_messages) > limit:  # a message has at least one token
            raise RequestError(
                f"{len(raw_messages)} messages do not fit into the model's maximum context length of "
                f"{limit} tokens",
                param="messages",
                code="context_length_exceeded",
            )
        return read_messages(raw_messages, source, self._options.lenient_fields, warnings)

    def _default_max_tokens(self) -> int:
        return _DEFAULT_MAX_TOKENS

    def _top_logprobs(self, request: ChatRequest) -> int | None:
        top = request.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise RequestError(
                f"'top_logprobs' must be in [0, {MAX_LOGPROBS}], not {top}", param="top_logprobs"
            )
        if request.logprobs:
            return top
        if top:
            raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
        return None

    def _response(self, request: GenerateRequest, results: list[Update], usage: Usage) -> ChatResponse:
        options, first = request.options, results[0]
        response = ChatResponse(
            id=request.id,
            created=request.created,
            model=self._models.name,
            system_fingerprint=self._options.fingerprint,
            choices=[self._choice(request, index, result) for index, result in enumerate(results)],
            usage=usage,
            warnings=request.warnings or msgspec.UNSET,
        )
        if options.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(
                options.tokens, first.prompt_logprobs, options.prompt_logprobs
            )
        if options.prompt_ids:
            response.prompt_token_ids = request.prompt(0).ids
        return response

    def _choice(self, request: GenerateRequest, index: int, result: Update) -> ChatChoice:
        assert result.reason is not None
        options = request.options
        return ChatChoice(
            index=index,
            message=_reply(request.echo(index) + result.text, result),
            finish_reason=openai_reason(result.reason, result.called),
            raw_finish_reason=result.reason,
            stop_reason=result.stop_reason,
            logprobs=None if options.logprobs is None else self._logprobs(request, index, result.logprobs),
            token_ids=result.token_ids.tolist() if options.token_ids else msgspec.UNSET,
        )

    def _text_options(self, request: ChatRequest, prompts: Sequence[Prompt]) -> TextOptions:
        return replace(super()._text_options(request, prompts), reply=prompts[0].reply)

    def _shows_reasoning(self, request: ChatRequest) -> bool:
        return request.include_reasoning is not False

    def _delta(self, update: Update) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": update.text} if update.text else {}
        if reasoning := update.reasoning:
            delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if update.calls:
            delta["tool_calls"] = [_call_delta(call) for call in update.calls]
        return {"delta": delta}

    def _logprobs(
        self, request: GenerateRequest, index: int, entries: Sequence[TokenLogprob]
    ) -> ChatLogprobs:
        return chat_logprobs(request.options.tokens, entries, request.options.logprobs or 0)

    def _first_frame(
        self,
        template: ChunkTemplate,
        request: GenerateRequest,
        index: int,
        update: Update,
        usage: Usage | None,
    ) -> bytes:
        delta = {"role": ASSISTANT, "content": request.echo(index)}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        more: dict[str, Any] = (
            {"prompt_token_ids": request.prompt(index).ids} if request.options.prompt_ids else {}
        )
        return template.frame([choice], usage, **more)


def _reply(content: str, result: Update) -> Reply:
    shown = result.reasoning or msgspec.UNSET
    calls = [ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments)) for call in result.calls]
    return Reply(
        content=content if content or not calls else None,
        reasoning=shown,
        reasoning_content=shown,
        tool_calls=calls or msgspec.UNSET,
    )


def _call_delta(call: CallDelta) -> dict[str, Any]:
    """The first delta of a call has its id and name."""
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
