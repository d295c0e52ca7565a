"""Reads the bodies of /v1/completions."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, cast

from frontend.errors import RequestError
from frontend.renderers.completions import completion_renderer
from frontend.schemas.completions import COMPLETIONS, CompletionRequest
from frontend.serving.amounts import check_choices, check_prompt_tokens
from frontend.serving.caller import Caller
from frontend.serving.endpoint import ParsedRequest
from frontend.serving.prompts import Prompt, PromptEncoder, truncated
from frontend.serving.sampling import requested_max_tokens

__all__ = ["CompletionEndpoint"]


class CompletionEndpoint:
    """POST /v1/completions."""

    id_prefix: ClassVar[str] = "cmpl-"
    field_names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, encoder: PromptEncoder, lenient: bool):
        self._encoder = encoder
        self._lenient = lenient

    def read(self, body: bytes, caller: Caller) -> ParsedRequest:
        """See Endpoint."""
        request, warnings = COMPLETIONS.decode(body, self._lenient)
        return ParsedRequest(
            fields=request,
            prompts=partial(self._prompts, request),
            renderer=completion_renderer,
            default_max_tokens=self._encoder.default_max_tokens,
            warnings=warnings,
            logprobs=request.logprobs,
            echo_logprobs=True,
            score_only=bool(request.echo) and requested_max_tokens(request) == 0,
        )

    def _prompts(self, request: CompletionRequest) -> list[Prompt]:
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise RequestError("'best_of' must equal 'n': all choices are returned", param="best_of")
        prompt = request.prompt
        if not prompt:
            raise RequestError("'prompt' must hold at least one token", param="prompt")
        kept = self._encoder.kept_tokens(request)
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
        add_special_tokens = request.add_special_tokens is not False
        ids = self._encoder.encode(request, text, add_special_tokens)
        shown = truncated(ids, kept, request)
        return Prompt(shown, text if len(shown) == len(ids) else None)
