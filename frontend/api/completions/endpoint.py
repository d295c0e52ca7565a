"""Reads the bodies of /v1/completions."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, cast

from frontend.api.completions.renderer import completion_renderer
from frontend.api.completions.schema import COMPLETIONS, CompletionRequest
from frontend.api.generation.amounts import check_choices, check_prompt_tokens
from frontend.api.generation.caller import Caller
from frontend.api.generation.endpoint import ParsedRequest
from frontend.api.generation.prompts import Prompt, PromptEncoder, truncated
from frontend.api.generation.sampling import requested_max_tokens
from frontend.errors import RequestError
from frontend.text.fim import FillInTheMiddle

__all__ = ["CompletionEndpoint"]


class CompletionEndpoint:
    """POST /v1/completions."""

    id_prefix: ClassVar[str] = "cmpl-"
    operation: ClassVar[str] = "text_completion"
    field_names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, encoder: PromptEncoder, fim: FillInTheMiddle | None, lenient: bool):
        self._encoder = encoder
        self._fim = fim
        self._lenient = lenient

    def read(self, body: bytes, caller: Caller) -> ParsedRequest:
        request, warnings = COMPLETIONS.decode(body, self._lenient)
        if request.suffix:
            self._check_suffix(request, warnings)
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
        if request.suffix and not isinstance(prompt if isinstance(prompt, str) else prompt[0], str):
            raise RequestError("'suffix' needs a prompt of text, not of token ids", param="suffix")
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

    def _check_suffix(self, request: CompletionRequest, warnings: list[str]) -> None:
        """Refuse a suffix that cannot be honoured, and stop where the inserted text ends."""
        if self._fim is None:
            problem = (
                "'suffix' needs a model that can fill in the middle, such as Qwen2.5-Coder, DeepSeek-Coder, "
                "StarCoder, CodeLlama or Codestral"
            )
            if not self._lenient:
                raise RequestError(problem, param="suffix", code="unsupported_parameter")
            warnings.append(f"{problem}, and was left out")
            request.suffix = None
            return
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(request, name):
                raise RequestError(f"'suffix' and '{name}' cannot be combined: leave one out", param=name)
        if ids := self._fim.stop_token_ids:
            request.stop_token_ids = [*(request.stop_token_ids or ()), *ids]

    def _text_prompts(self, request: CompletionRequest, texts: list[str], kept: int | None) -> list[Prompt]:
        prompts = []
        tokens = 0
        for text in texts:
            prompts.append(self._text_prompt(request, text, kept))
            tokens += len(prompts[-1].ids)
            check_prompt_tokens(tokens, len(texts))
        return prompts

    def _text_prompt(self, request: CompletionRequest, text: str, kept: int | None) -> Prompt:
        add_special_tokens = request.add_special_tokens is not False
        if request.suffix:
            assert self._fim is not None  # `_check_suffix`
            first = self._encoder.encode(request, "", add_special_tokens)
            encode = partial(self._encoder.encode, request, add_special_tokens=False)
            return Prompt([*first, *self._fim.prompt(text, request.suffix, encode)])
        ids = self._encoder.encode(request, text, add_special_tokens)
        shown = truncated(ids, kept, request)
        return Prompt(shown, text if len(shown) == len(ids) else None)
