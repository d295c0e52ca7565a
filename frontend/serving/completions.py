"""Completions: prompts are continued as they stand."""

from typing import Any, cast

import msgspec

from frontend.errors import RequestError
from frontend.output_processor import Update
from frontend.schemas.completions import (
    COMPLETIONS,
    CompletionAnswer,
    CompletionChoice,
    CompletionRequest,
)
from frontend.schemas.generation import Usage
from frontend.serving.generation import GenerationService, Job
from frontend.serving.reasons import openai_reason

__all__ = ["CompletionService"]

_DEFAULT_MAX_TOKENS = 256


class CompletionService(GenerationService[CompletionRequest]):
    """POST /v1/completions."""

    schema = COMPLETIONS
    id_prefix = "cmpl-"
    chunk_object = "text_completion"

    def _prompts(self, request: CompletionRequest, warnings: list[str]) -> list[list[int]]:
        prompt = request.prompt
        if not prompt:
            raise RequestError("'prompt' must hold at least one token", param="prompt")
        if isinstance(prompt, str):
            return [self._inputs.encode(prompt)]
        match {type(item) for item in prompt}:
            case kinds if kinds == {int}:
                return [cast(list[int], prompt)]
            case kinds if kinds == {str}:
                return [self._inputs.encode(text) for text in cast(list[str], prompt)]
            case kinds if kinds == {list}:
                return cast(list[list[int]], prompt)
        raise RequestError("'prompt' mixes texts, token ids and lists: send one kind", param="prompt")

    def _default_max_tokens(self) -> int:
        return _DEFAULT_MAX_TOKENS

    def _answer(self, job: Job, results: list[Update], usage: Usage) -> CompletionAnswer:
        return CompletionAnswer(
            id=job.id,
            created=job.created,
            model=self._models.name,
            choices=[self._choice(index, result) for index, result in enumerate(results)],
            usage=usage,
            warnings=job.warnings or msgspec.UNSET,
        )

    def _choice(self, index: int, result: Update) -> CompletionChoice:
        assert result.reason is not None
        return CompletionChoice(
            index=index,
            text=result.text,
            finish_reason=openai_reason(result.reason),
            raw_finish_reason=result.reason,
            stop_reason=result.stop_reason,
            token_ids=msgspec.UNSET if self._options.has_tokenizer else result.token_ids.tolist(),
        )

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}
