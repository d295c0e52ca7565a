"""Chat completions: the checkpoint's chat template turns messages into a prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from atom.sampling_params import MAX_LOGPROBS
from frontend.chat_encoder import ChatEncoder
from frontend.chat_template import ChatTemplate
from frontend.engine_client import EngineClient
from frontend.errors import RequestError
from frontend.harmony import Harmony
from frontend.input_processor import MAX_EXCESS_TOKENS, InputProcessor
from frontend.output_processor import TextOptions, Update
from frontend.schemas.chat import (
    CHAT,
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    Reply,
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
from frontend.template_source import TemplateSource
from frontend.text_executor import TextExecutor
from frontend.token_logprobs import TokenLogprob

__all__ = ["ChatService"]

_DEFAULT_MAX_TOKENS = 8192
_MAX_OPTIONS_BYTES = 64 * 1024
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


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
        reply_format: Harmony | None = None,
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
        try:
            messages = self._messages(request, encoder.template.source, warnings)
            options = self._template_options(request, encoder.template, warnings)
            ids = encoder.encode(
                messages,
                options,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                add_special_tokens=bool(request.add_special_tokens),
                excess=excess,
            )
        except RecursionError:
            raise RequestError("the messages or template options are nested too deeply", "messages") from None
        last = messages[-1]
        return Prompt(ids, echo=last["content"] if last["role"] == ASSISTANT else "")

    def _template_options(
        self, request: ChatRequest, template: ChatTemplate, warnings: list[str]
    ) -> dict[str, Any]:
        """The client's template variables. Raises RequestError for one that the template does not read."""
        if request.continue_final_message and request.add_generation_prompt:
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true",
                param="continue_final_message",
            )
        given = request.chat_template_kwargs or {}
        if (size := len(msgspec.json.encode(given))) > _MAX_OPTIONS_BYTES:
            raise RequestError(
                f"'chat_template_kwargs' has {size} bytes, at most {_MAX_OPTIONS_BYTES} are allowed",
                param="chat_template_kwargs",
            )
        options = [(name, f"chat_template_kwargs.{name}", value) for name, value in given.items()]
        if request.reasoning_effort is not None:
            options.append(("reasoning_effort", "reasoning_effort", _effort(request.reasoning_effort)))
        unread = [field for name, field, _ in options if name not in template.options]
        if unread and not self._options.lenient_fields:
            readable = ", ".join(sorted(template.options)) or "no variables"
            raise RequestError(
                f"'{unread[0]}' has no effect: this model's chat template reads {readable}",
                param=unread[0],
                code="unsupported_parameter",
            )
        warnings += [f"'{field}' is not read by the chat template and was left out" for field in unread]
        return {name: value for name, _, value in options if name in template.options}

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
            message=_reply(request.echo(index) + result.text, result.reasoning),
            finish_reason=openai_reason(result.reason),
            raw_finish_reason=result.reason,
            stop_reason=result.stop_reason,
            logprobs=None if options.logprobs is None else self._logprobs(request, index, result.logprobs),
            token_ids=result.token_ids.tolist() if options.token_ids else msgspec.UNSET,
        )

    def _text_options(self, request: ChatRequest) -> TextOptions:
        """With special tokens included, the text is not split into channels."""
        plain = super()._text_options(request)
        return replace(plain, format=self._format) if plain.skip_special_tokens else plain

    def _delta(self, update: Update) -> dict[str, Any]:
        delta = {"content": update.text} if update.text else {}
        if reasoning := update.reasoning:
            delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
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


def _reply(content: str, reasoning: str) -> Reply:
    shown = reasoning or msgspec.UNSET
    return Reply(content=content, reasoning=shown, reasoning_content=shown)


def _effort(value: str) -> str:
    if value not in _EFFORTS:
        raise RequestError(
            f"'reasoning_effort' must be one of {', '.join(_EFFORTS)}, not {value!r:.40}",
            param="reasoning_effort",
        )
    return value
