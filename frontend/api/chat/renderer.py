"""Responses of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from frontend.api.chat.schema import ChatChoice, ChatLogprobs, ChatResponse, FunctionCall, Reply, ToolCall
from frontend.api.generation.chunks import ChunkRenderer
from frontend.api.generation.generate_request import GenerateRequest
from frontend.api.generation.kv_transfer import response_params
from frontend.api.generation.logprobs import chat_logprobs, prompt_logprobs
from frontend.api.generation.reasons import openai_reason
from frontend.api.schemas.generation import Usage
from frontend.text.output_processor import SequenceOutput
from frontend.text.reply_formats.base import CallDelta
from frontend.text.token_logprobs import TokenLogprob

__all__ = ["chat_renderer"]


def chat_renderer(request: GenerateRequest) -> ChunkRenderer:
    """A renderer of chat completions."""
    return ChunkRenderer(request, _ChatForm(request))


class _ChatForm:
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, request: GenerateRequest):
        self._request = request

    def response(self, results: list[SequenceOutput], usage: Usage) -> ChatResponse:
        request = self._request
        options = request.options
        first = results[0]
        response = ChatResponse(
            id=request.id,
            created=request.created,
            model=request.model,
            system_fingerprint=request.fingerprint,
            choices=[self._choice(index, result) for index, result in enumerate(results)],
            usage=usage,
            warnings=request.warnings or msgspec.UNSET,
        )
        if options.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(
                options.tokens, first.prompt_logprobs, options.prompt_logprobs
            )
        if options.hands_over:
            response.kv_transfer_params = response_params(results, options.hands_over)
        if options.prompt_ids:
            response.prompt_token_ids = request.prompt(0).ids
        return response

    def _choice(self, index: int, result: SequenceOutput) -> ChatChoice:
        assert result.reason is not None
        options = self._request.options
        return ChatChoice(
            index=index,
            message=_reply(self._request.echo(index) + result.text, result),
            finish_reason=openai_reason(result.reason, result.called),
            raw_finish_reason=result.reason,
            stop_reason=result.stop_reason,
            logprobs=None if options.logprobs is None else self.logprobs(index, result.logprobs),
            token_ids=result.token_ids.tolist() if options.token_ids else msgspec.UNSET,
        )

    def delta(self, update: SequenceOutput) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": update.text} if update.text else {}
        if reasoning := update.reasoning:
            delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if update.calls:
            delta["tool_calls"] = [_call_delta(call) for call in update.calls]
        return {"delta": delta}

    def logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
        options = self._request.options
        return chat_logprobs(options.tokens, entries, options.logprobs or 0)

    def first_choice(self, index: int, update: SequenceOutput) -> tuple[dict[str, Any], dict[str, Any]]:
        delta = {"role": "assistant", "content": self._request.echo(index)}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        shows_ids = self._request.options.prompt_ids
        return choice, {"prompt_token_ids": self._request.prompt(index).ids} if shows_ids else {}


def _reply(content: str, result: SequenceOutput) -> Reply:
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
