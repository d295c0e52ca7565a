"""Chat: a conversation becomes a prompt by the checkpoint's template."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from frontend.chat_template import ChatTemplate
from frontend.engine_client import EngineClient
from frontend.errors import RequestError
from frontend.input_processor import InputProcessor
from frontend.output_processor import Update
from frontend.schemas.chat import CHAT, MESSAGE, ChatAnswer, ChatChoice, ChatRequest, Message, Reply
from frontend.schemas.generation import Usage
from frontend.serving.generation import GenerationService, Job, ServingOptions
from frontend.serving.models import ModelService
from frontend.serving.reasons import openai_reason
from frontend.serving.sse import ChunkTemplate

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
        threads: ThreadPoolExecutor,
        template: ChatTemplate | None,
    ):
        super().__init__(client, inputs, models, options, threads)
        self._chat_template = template

    def _prompts(self, request: ChatRequest, warnings: list[str]) -> list[list[int]]:
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template: put chat_template.jinja into its directory, "
                "or use /v1/completions",
                param="messages",
            )
        messages = self._messages(request, warnings)
        text = self._chat_template.render(messages, request.chat_template_kwargs or {})
        return [self._inputs.encode(text, add_special_tokens=False)]

    def _messages(self, request: ChatRequest, warnings: list[str]) -> list[dict[str, Any]]:
        if request.messages is not None and request.prompt is not None:
            raise RequestError("'prompt' is another name of 'messages': send one of them", param="prompt")
        raw_messages = request.messages or request.prompt
        if not raw_messages:
            raise RequestError("'messages' must hold at least one message", param="messages")
        messages = []
        for index, raw in enumerate(raw_messages):
            where = f"messages[{index}]."
            message, left_out = MESSAGE.decode(raw, self._options.lenient_fields, where)
            warnings += left_out
            messages.append(_for_template(message, where))
        return messages

    def _default_max_tokens(self) -> int:
        return _DEFAULT_MAX_TOKENS

    def _answer(self, job: Job, results: list[Update], usage: Usage) -> ChatAnswer:
        return ChatAnswer(
            id=job.id,
            created=job.created,
            model=self._models.name,
            choices=[_choice(index, result) for index, result in enumerate(results)],
            usage=usage,
            warnings=job.warnings or msgspec.UNSET,
        )

    def _text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _first_frame(self, template: ChunkTemplate, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return template.frame([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])


def _choice(index: int, result: Update) -> ChatChoice:
    assert result.reason is not None
    return ChatChoice(
        index=index,
        message=Reply(content=result.text),
        finish_reason=openai_reason(result.reason),
        raw_finish_reason=result.reason,
        stop_reason=result.stop_reason,
    )


def _for_template(message: Message, where: str) -> dict[str, Any]:
    """The message as templates expect it: plain text, absent fields absent."""
    fields = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
    fields["content"] = _plain_text(message, where)
    if message.tool_calls is not None:
        fields["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
    return fields


def _plain_text(message: Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.tool_calls or message.role == "assistant":
            return ""
        raise RequestError(f"'{where}content' is missing", param=f"{where}content")
    return "\n".join(_part_text(part, f"{where}content[{index}]") for index, part in enumerate(content))


def _part_text(part: dict[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise RequestError(
            f"'{where}' has type {kind!r}; this model takes parts of type 'text' only", param=where
        )
    if not isinstance(text, str):
        raise RequestError(f"'{where}.text' must be a string", param=f"{where}.text")
    return text


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI sends a call's arguments as JSON text; templates expect the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # a model's earlier slip stays as the model wrote it
    return {**call, "function": {**function, "arguments": arguments}}
