"""Completions: prompts are continued as they stand."""

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
from frontend.serving.generation import GenerationService
from frontend.serving.logprobs import completion_logprobs, echoed_logprobs, joined, prompt_logprobs
from frontend.serving.prompts import Prompt
from frontend.serving.reasons import openai_reason
from frontend.serving.sampling import answer_limit
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
            raise RequestError("'best_of' must equal 'n': every choice is returned", param="best_of")
        prompt = request.prompt
        if not prompt:
            raise RequestError("'prompt' must hold at least one token", param="prompt")
        if isinstance(prompt, str):
            return [self._written(request, prompt)]
        match {type(item) for item in prompt}:
            case kinds if kinds == {int}:
                return [Prompt(self._fit(request, cast(list[int], prompt)))]
            case kinds if kinds == {str}:
                return [self._written(request, text) for text in cast(list[str], prompt)]
            case kinds if kinds == {list}:
                return [Prompt(self._fit(request, ids)) for ids in cast(list[list[int]], prompt)]
        raise RequestError("'prompt' mixes texts, token ids and lists: send one kind", param="prompt")

    def _written(self, request: CompletionRequest, text: str) -> Prompt:
        ids = self._inputs.encode(text, add_special_tokens=request.add_special_tokens is not False)
        kept = self._fit(request, ids)
        return Prompt(kept, text if len(kept) == len(ids) else None)

    def _default_max_tokens(self) -> int:
        return _DEFAULT_MAX_TOKENS

    def _top_logprobs(self, request: CompletionRequest) -> int | None:
        return request.logprobs

    def _scores_only(self, request: CompletionRequest) -> bool:
        return bool(request.echo) and answer_limit(request) == 0

    def _prompt_logprobs(self, shown: ResponseOptions) -> int | None:
        echoed = shown.logprobs if shown.echo else None
        counts = [count for count in (shown.prompt_logprobs, echoed) if count is not None]
        return max(counts, default=None)

    def _answer(self, job: GenerateRequest, results: list[Update], usage: Usage) -> CompletionResponse:
        return CompletionResponse(
            id=job.id,
            created=job.created,
            model=self._models.name,
            system_fingerprint=self._options.fingerprint,
            choices=[self._choice(job, index, result) for index, result in enumerate(results)],
            usage=usage,
            warnings=job.warnings or msgspec.UNSET,
        )

    def _choice(self, job: GenerateRequest, index: int, result: Update) -> CompletionChoice:
        assert result.reason is not None
        shown = job.shown
        choice = CompletionChoice(
            index=index,
            text=job.echo(index) + result.text,
            finish_reason=openai_reason(result.reason),
            raw_finish_reason=result.reason,
            stop_reason=result.stop_reason,
        )
        if shown.logprobs is not None:
            choice.logprobs = self._logprobs(job, index, result.logprobs)
            if shown.echo:
                choice.logprobs = joined(self._echoed_logprobs(job, index, result), choice.logprobs)
        if shown.token_ids:
            choice.token_ids = result.token_ids.tolist()
        if shown.prompt_ids:
            choice.prompt_token_ids = job.prompt(index).ids
        if shown.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(
                shown.names, result.prompt_logprobs, shown.prompt_logprobs
            )
        return choice

    def _news(self, update: Update) -> dict[str, Any]:
        return {"text": update.text}

    def _logprobs(
        self, job: GenerateRequest, index: int, entries: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        top = job.shown.logprobs or 0
        return completion_logprobs(job.shown.names, entries, top, offset=len(job.echo(index)))

    def _echoed_logprobs(self, job: GenerateRequest, index: int, update: Update) -> CompletionLogprobs:
        top = job.shown.logprobs or 0
        return echoed_logprobs(job.shown.names, job.prompt(index), update.prompt_logprobs, top)

    def _first_frame(
        self, template: ChunkTemplate, job: GenerateRequest, index: int, update: Update, usage: Usage | None
    ) -> bytes:
        shown = job.shown
        if not (shown.echo or shown.prompt_ids):
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "text": job.echo(index),
            "logprobs": None,
            "finish_reason": None,
        }
        if shown.echo and shown.logprobs is not None:
            choice["logprobs"] = self._echoed_logprobs(job, index, update)
        if shown.prompt_ids:
            choice |= {"prompt_token_ids": job.prompt(index).ids, "token_ids": []}
        return template.frame([choice], usage)
