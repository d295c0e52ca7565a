"""Responses of /v1/completions."""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from frontend.api.completions.schema import CompletionChoice, CompletionLogprobs, CompletionResponse
from frontend.api.generation.chunks import ChunkRenderer
from frontend.api.generation.generate_request import GenerateRequest
from frontend.api.generation.kv_transfer import response_params
from frontend.api.generation.logprobs import completion_logprobs, echoed_logprobs, joined, prompt_logprobs
from frontend.api.generation.reasons import openai_reason
from frontend.api.schemas.generation import Usage
from frontend.text.output_processor import SequenceOutput
from frontend.text.token_logprobs import TokenLogprob

__all__ = ["completion_renderer"]


def completion_renderer(request: GenerateRequest) -> ChunkRenderer:
    """A renderer of text completions."""
    return ChunkRenderer(request, _CompletionForm(request))


class _CompletionForm:
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(self, request: GenerateRequest):
        self._request = request

    def response(self, results: list[SequenceOutput], usage: Usage) -> CompletionResponse:
        request = self._request
        hands_over = request.options.hands_over
        return CompletionResponse(
            id=request.id,
            created=request.created,
            model=request.model,
            system_fingerprint=request.fingerprint,
            choices=[self._choice(index, result) for index, result in enumerate(results)],
            usage=usage,
            kv_transfer_params=response_params(results, hands_over) if hands_over else msgspec.UNSET,
            warnings=request.warnings or msgspec.UNSET,
        )

    def _choice(self, index: int, result: SequenceOutput) -> CompletionChoice:
        assert result.reason is not None
        options = self._request.options
        choice = CompletionChoice(
            index=index,
            text=self._request.echo(index) + result.text,
            finish_reason=openai_reason(result.reason),
            raw_finish_reason=result.reason,
            stop_reason=result.stop_reason,
        )
        if options.logprobs is not None:
            choice.logprobs = self.logprobs(index, result.logprobs)
            if options.echo:
                choice.logprobs = joined(self._echoed_logprobs(index, result), choice.logprobs)
        if options.token_ids:
            choice.token_ids = result.token_ids.tolist()
        if options.prompt_ids:
            choice.prompt_token_ids = self._request.prompt(index).ids
        if options.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(
                options.tokens, result.prompt_logprobs, options.prompt_logprobs
            )
        return choice

    def delta(self, update: SequenceOutput) -> dict[str, Any]:
        return {"text": update.text}

    def logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        options = self._request.options
        offset = len(self._request.echo(index))
        return completion_logprobs(options.tokens, entries, options.logprobs or 0, offset=offset)

    def first_choice(
        self, index: int, update: SequenceOutput
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        options = self._request.options
        if not (options.echo or options.prompt_ids):
            return None
        choice: dict[str, Any] = {
            "index": index,
            "text": self._request.echo(index),
            "logprobs": None,
            "finish_reason": None,
        }
        if options.echo and options.logprobs is not None:
            choice["logprobs"] = self._echoed_logprobs(index, update)
        if options.prompt_ids:
            choice |= {"prompt_token_ids": self._request.prompt(index).ids, "token_ids": []}
        return choice, {}

    def _echoed_logprobs(self, index: int, update: SequenceOutput) -> CompletionLogprobs:
        options = self._request.options
        prompt = self._request.prompt(index)
        top = options.logprobs or 0
        return echoed_logprobs(options.tokens, prompt, update.prompt_logprobs, top)
