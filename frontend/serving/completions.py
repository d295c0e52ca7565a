"""Text completions."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from frontend.errors import RequestError
from frontend.output_processor import Update
from frontend.schemas.completions import (
    COMPLETIONS,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from frontend.schemas.generation import Usage
from frontend.serving.generate_request import GenerateRequest, ResponseOptions
from frontend.serving.generation import GenerationService, check_choices, check_prompt_tokens
from frontend.serving.logprobs import completion_logprobs, echoed_logprobs, joined, prompt_logprobs
from frontend.serving.prompts import Prompt, truncated
from frontend.serving.reasons import openai_reason
from frontend.serving.sampling import requested_max_tokens
from frontend.serving.sse import ChunkTemplate
from frontend.token_logprobs import TokenLogprob

__all__ = ["CompletionService"]

_DEFAULT_MAX_TOKENS = 256


class CompletionService(GenerationService[CompletionRequest]):
    """POST /v1/completions."""

    schema = COMPLETIONS
    id_prefix = "cmpl-"
    chunk_object = "text_completion"

    def _prompts(self, request: CompletionRequest, warnings: list[str]) -> list[Prompt]:
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise RequestError("'best_of' must equal 'n': all choices are returned", param="best_of")
        prompt = request.prompt
        if not prompt:
            raise RequestError("'prompt' must hold at least one token", param="prompt")
        kept = self._kept_tokens(request)
        if isinstance(prompt, str):
            return [self._text_prompt(request, prompt, kept)]
        if not isinstance(prompt[0], int):
            check_choices(len(prompt), request.n or 1)
        match {type(item) for item in prompt}:
            case kinds if kinds == {int}:
                return [Prompt(truncated(cast(list[int], prompt), kept, request))]
            case kinds if kinds == {str}:
                return self._text_prompts(request, cast(list[str], prompt), kept)
            case kinds if kinds == {list}:
                return [Prompt(truncated(ids, kept, request)) for ids in cast(list[list[int]], prompt)]
        raise RequestError("'prompt' mixes texts, token ids and lists: send one kind", param="prompt")

    def _text_prompts(self, request: CompletionRequest, texts: list[str], kept: int | None) -> list[Prompt]:
        prompts, tokens = [], 0
        for text in texts:
            prompts.append(self._text_prompt(request, text, kept))
            tokens += len(prompts[-1].ids)
            check_prompt_tokens(tokens, len(texts))
        return prompts

    def _text_prompt(self, request: CompletionRequest, text: str, kept: int | None) -> Prompt:
        ids = self._encode(request, text, add_special_tokens=request.add_special_tokens is not False)
        shown = truncated(ids, kept, request)
        return Prompt(shown, text if len(shown) == len(ids) else None)

    def _default_max_tokens(self) -> int:
        return _DEFAULT_MAX_TOKENS

    def _top_logprobs(self, request: CompletionRequest) -> int | None:
        return request.logprobs

    def _scores_only(self, request: CompletionRequest) -> bool:
        return bool(request.echo) and requested_max_tokens(request) == 0

    def _prompt_logprobs(self, options: ResponseOptions) -> int | None:
        echoed = options.logprobs if options.echo else None
        counts = [count for count in (options.prompt_logprobs, echoed) if count is not None]
        return max(counts, default=None)

    def _response(self, request: GenerateRequest, results: list[Update], usage: Usage) -> CompletionResponse:
        return CompletionResponse(
            id=request.id,
            created=request.created,
            model=self._models.name,
            system_fingerprint=self._options.fingerprint,
            choices=[self._choice(request, index, result) for index, result in enumerate(results)],
            usage=usage,
            warnings=request.warnings or msgspec.UNSET,
        )

    def _choice(self, request: GenerateRequest, index: int, result: Update) -> CompletionChoice:
        assert result.reason is not None
        options = request.options
        choice = CompletionChoice(
            index=index,
            text=request.echo(index) + result.text,
            finish_reason=openai_reason(result.reason),
            raw_finish_reason=result.reason,
            stop_reason=result.stop_reason,
        )
        if options.logprobs is not None:
            choice.logprobs = self._logprobs(request, index, result.logprobs)
            if options.echo:
                choice.logprobs = joined(self._echoed_logprobs(request, index, result), choice.logprobs)
        if options.token_ids:
            choice.token_ids = result.token_ids.tolist()
        if options.prompt_ids:
            choice.prompt_token_ids = request.prompt(index).ids
        if options.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(
                options.tokens, result.prompt_logprobs, options.prompt_logprobs
            )
        return choice

    def _delta(self, update: Update) -> dict[str, Any]:
        return {"text": update.text}

    def _logprobs(
        self, request: GenerateRequest, index: int, entries: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        top = request.options.logprobs or 0
        return completion_logprobs(request.options.tokens, entries, top, offset=len(request.echo(index)))

    def _echoed_logprobs(self, request: GenerateRequest, index: int, update: Update) -> CompletionLogprobs:
        top = request.options.logprobs or 0
        return echoed_logprobs(request.options.tokens, request.prompt(index), update.prompt_logprobs, top)

    def _first_frame(
        self,
        template: ChunkTemplate,
        request: GenerateRequest,
        index: int,
        update: Update,
        usage: Usage | None,
    ) -> bytes:
        options = request.options
        if not (options.echo or options.prompt_ids):
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "text": request.echo(index),
            "logprobs": None,
            "finish_reason": None,
        }
        if options.echo and options.logprobs is not None:
            choice["logprobs"] = self._echoed_logprobs(request, index, update)
        if options.prompt_ids:
            choice |= {"prompt_token_ids": request.prompt(index).ids, "token_ids": []}
        return template.frame([choice], usage)
