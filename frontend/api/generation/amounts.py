"""Limits on a whole request: choices, prompt tokens, log probabilities, lists of ids."""

from atom.shared.sampling_params import SamplingParams
from frontend.api.generation.prompts import Prompt
from frontend.errors import RequestError
from frontend.text.input_processor import CheckedParams

__all__ = ["check_amounts", "check_bad_words", "check_choices", "check_prompt_tokens", "check_shown_prompts"]

MAX_CHOICES = 1024
# Prompt logprobs of one request, top tokens included: some hundred MB while a response is encoded.
MAX_PROMPT_LOGPROBS = 1 << 20
# `allowed_token_ids` of all sequences of a request: 64 MiB in messages.
MAX_ALLOWED_IDS = 1 << 24
# All prompts of a request: some hundred MB while it is prepared.
MAX_PROMPT_TOKENS = 1 << 21
# `bad_words` of all sequences of a request, as token ids.
MAX_BAD_WORD_IDS = 1 << 20


def check_choices(prompts: int, n: int) -> None:
    """Raises RequestError for too many choices."""
    if n * prompts > MAX_CHOICES:
        raise RequestError(f"{prompts} prompts with n={n} are more than {MAX_CHOICES} choices", param="n")


def check_prompt_tokens(tokens: int, prompts: int) -> None:
    """Raises RequestError for several prompts with too many tokens in all."""
    if prompts > 1 and tokens > MAX_PROMPT_TOKENS:
        raise RequestError(
            f"the {prompts} prompts have {tokens} tokens or more, at most {MAX_PROMPT_TOKENS} are allowed "
            "in one request: send fewer prompts at once",
            param="prompt",
        )


def check_amounts(prompts: list[Prompt], params: SamplingParams, logprobs_param: str) -> None:
    """Raises RequestError for too much of anything; all prompts have `params` except max_tokens.

    `logprobs_param` is the field that asks for prompt logprobs.
    """
    n = params.n
    check_choices(len(prompts), n)
    prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    check_prompt_tokens(prompt_tokens, len(prompts))
    tokens = n * prompt_tokens
    if params.prompt_logprobs is not None and tokens * (1 + params.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"{1 + params.prompt_logprobs} log probabilities for each of {tokens} prompt tokens are more "
            f"than {MAX_PROMPT_LOGPROBS}: send fewer prompts at once, or request fewer log probabilities",
            param=logprobs_param,
        )
    allowed = len(params.allowed_token_ids or ())
    if n * len(prompts) * allowed > MAX_ALLOWED_IDS:
        raise RequestError(
            f"{allowed} allowed ids for each of {n * len(prompts)} choices are more than {MAX_ALLOWED_IDS}",
            param="allowed_token_ids",
        )


def check_shown_prompts(size: int, limit: int, param: str) -> None:
    """Raises RequestError for prompts that take too many bytes in the response; `param` asks for them."""
    if size > limit:
        raise RequestError(
            f"'{param}' shows prompts in about {size} bytes of the response, and at most {limit} are "
            "possible: request fewer choices, or send fewer or shorter prompts",
            param=param,
            code="response_too_large",
        )


def check_bad_words(checked: CheckedParams, sequences: int) -> None:
    """Raises RequestError for too many ids in the `bad_words` of all sequences."""
    processors = checked.logits_processors
    count = 0 if processors is None else sum(map(len, processors.bad_words))
    if count * sequences > MAX_BAD_WORD_IDS:
        raise RequestError(
            f"{count} ids in bad_words for each of {sequences} choices are more than {MAX_BAD_WORD_IDS}",
            param="bad_words",
        )
