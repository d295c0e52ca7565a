"""Builds the engine core's requests from prompts and sampling parameters.

All limits are checked here, before anything is sent.
"""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.codec import MAX_FRAME_BYTES, encode
from atom.shared.messages.engine import (
    MAX_ADD_REQUEST_BYTES,
    AddRequest,
    LogitsProcessors,
    Sampling,
    pack_ids,
)
from atom.shared.messages.grammar import Grammar, RowGrammar
from atom.shared.messages.images import PromptImage
from atom.shared.sampling_params import SEED_LIMIT, SamplingParams
from frontend.errors import RequestError
from frontend.text.constraint import Constraint
from frontend.text.reply_formats.base import ReasoningIds
from frontend.text.tokenizer import Tokenizer, TooManyTokensError

__all__ = ["MAX_EXCESS_TOKENS", "CheckedParams", "InputProcessor", "check_size"]

# Texts to be truncated or only tokenized may have this many tokens beyond the context length.
MAX_EXCESS_TOKENS = 1 << 18

# A frame leaves so much for what a replay adds to a request: ids that were generated.
_MARGIN_BYTES = 4 * 1024 * 1024
_NEUTRAL = LogitsProcessors()
_NO_DRAFTS = SpeculativeConfig()


@dataclass(frozen=True)
class CheckedParams:
    """The checked parameters that all requests of one SamplingParams share."""

    eos_token_ids: list[int]
    stop_token_ids: list[int]
    logits_processors: LogitsProcessors | None
    grammar: Grammar | None = None


class InputProcessor:
    """Checks and encodes requests for one model.

    `max_model_len` is in tokens. `scheduling_policy` is the engine core's: only "priority" reads priorities.
    `speculative` tells whether predictions are used, and whether acceptance is forced.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        scheduling_policy: str,
        speculative: SpeculativeConfig = _NO_DRAFTS,
    ):
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self._scheduling_policy = scheduling_policy
        self._uses_predictions = speculative.reads_text
        self._forces_acceptance = speculative.forced_length is not None
        self._vocab_size = checkpoint.vocab_size
        self._eos_token_ids = list(checkpoint.eos_token_ids)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Take over the limit of the engines, which their memory may have lowered."""
        self.max_model_len = max_model_len

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        excess: int = 0,
        tokenizer: Tokenizer | None = None,
    ) -> list[int]:
        """Token ids of `text`, by `tokenizer` instead of the model's where given.

        Raises RequestError for a model without a tokenizer, and for a text that has more than
        `excess` tokens beyond the context length: long texts are not even tokenized then.
        """
        tokenizer = tokenizer or self.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer: send the prompt as token ids", param="prompt")
        limit = self.max_model_len + excess
        try:
            return tokenizer.encode(text, add_special_tokens, limit)
        except TooManyTokensError as error:
            if not excess:
                raise self._too_long(f"{'' if error.exact else 'more than '}{error.count}") from None
            raise RequestError(
                f"the text has more than {limit} tokens: at most {excess} beyond the model's context length "
                f"of {self.max_model_len} are tokenized; send less text",
                param="prompt",
                code="context_length_exceeded",
            ) from None

    def prediction_ids(self, text: str) -> list[int]:
        """Token ids of the output that a client expects; empty where the engine does not use them.

        Raises RequestError for a model without a tokenizer, and for a text with more tokens than the
        context.
        """
        if not self._uses_predictions or not text:
            return []
        if self.tokenizer is None:
            raise RequestError(
                "this model has no tokenizer to read 'prediction' with: leave it out", param="prediction"
            )
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=False, max_tokens=self.max_model_len)
        except TooManyTokensError:
            raise self._too_long_prediction() from None
        # Ids beyond the model's vocabulary are never sampled.
        return [token_id for token_id in ids if token_id < self._vocab_size]

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises RequestError for a prompt that is empty, too long or outside the vocabulary."""
        self.room(prompt_ids)
        self.check_vocabulary(prompt_ids, "prompt")

    def check_vocabulary(self, ids: Collection[int], param: str) -> None:
        """Raises RequestError with `param` for ids outside the vocabulary."""
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"token id {token_id} in {param} is outside the vocabulary: "
                    f"ids go from 0 to {self._vocab_size - 1}",
                    param=param,
                )

    def room(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens can be generated after this prompt. Raises RequestError if none can."""
        if not prompt_ids:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise self._too_long(str(len(prompt_ids)))
        return room

    def row_grammar(
        self, constraint: Constraint, params: SamplingParams, reasoning: ReasoningIds | None
    ) -> RowGrammar:
        """How an output follows `constraint`, after the `reasoning` that its format may have.

        Raises RequestError for a model or parameters with which it could not end.
        """
        field = constraint.field
        if self.tokenizer is None:
            raise RequestError(f"'{field}' needs a tokenizer, and this model has none", param=field)
        if not self._eos_token_ids:
            raise RequestError(f"'{field}' needs an end-of-sequence id, and this model has none", param=field)
        if params.ignore_eos:
            raise RequestError(f"'ignore_eos' cannot be combined with '{field}'", param="ignore_eos")
        if reasoning is None or not (reasoning.inside or None not in (reasoning.begin, reasoning.end)):
            return RowGrammar(constraint.key, self._eos_token_ids)  # without reasoning
        if reasoning.end is None:
            raise RequestError(
                f"'{field}' is not supported for this model: no single token ends its reasoning",
                param=field,
                code="unsupported_parameter",
            )
        begin = -1 if reasoning.begin is None else reasoning.begin
        return RowGrammar(constraint.key, self._eos_token_ids, reasoning.inside, begin, reasoning.end)

    def check_params(self, params: SamplingParams, grammar: Grammar | None = None) -> CheckedParams:
        """The part of the engine's requests that all prompts with `params` share.

        Raises RequestError for ids outside the vocabulary, and for parameters that need a
        tokenizer or another scheduling policy.
        """
        self._check_support(params)
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
        ):
            if ids:
                self.check_vocabulary(ids, name)
        eos_token_ids = [] if params.ignore_eos else self._eos_token_ids
        stop_token_ids = list(params.stop_token_ids or ())
        processors = self._logits_processors(params, [*eos_token_ids, *stop_token_ids])
        if self._forces_acceptance:
            _check_unprocessed(params, processors, grammar)
        return CheckedParams(eos_token_ids, stop_token_ids, processors, grammar)

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_ids: Sequence[int],
        cache_salt: str = "",
        checked: CheckedParams | None = None,
        prediction_ids: Sequence[int] = (),
        images: Sequence[PromptImage] = (),
    ) -> AddRequest:
        """The request for the `n` sequences of one prompt with `images`, one for each id.

        `checked` is the result of `check_params` for parameters that differ in max_tokens at
        most. Raises RequestError as `check_params` does, for prompts and predictions that are too long
        or have ids outside the vocabulary, and for more bytes than a message may have.
        """
        checked = checked or self.check_params(params)
        self._check_length(prompt_ids, params.max_tokens)
        self.check_vocabulary(prompt_ids, "prompt")
        if prediction_ids:
            if len(prediction_ids) > self.max_model_len:
                raise self._too_long_prediction()
            self.check_vocabulary(prediction_ids, "prediction")
        packed = pack_ids(prompt_ids)
        seed = _unsigned_seed(params.seed)
        request = AddRequest(
            list(request_ids),
            packed,
            params.max_tokens,
            _sampling(params, seed, checked.logits_processors),
            eos_token_ids=checked.eos_token_ids,
            stop_token_ids=checked.stop_token_ids,
            priority=params.priority,
            cache_salt=cache_salt,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            prediction_ids=pack_ids(prediction_ids),
            grammar=checked.grammar,
            images=list(images),
        )
        check_size(request)
        return request

    def _too_long_prediction(self) -> RequestError:
        return RequestError(
            f"'prediction' has more than {self.max_model_len} tokens, the model's maximum context "
            "length: send less of it",
            param="prediction",
            code="context_length_exceeded",
        )

    def _too_long(self, count: str) -> RequestError:
        return RequestError(
            f"the model's maximum context length is {self.max_model_len} tokens, and the prompt "
            f"alone has {count}: shorten it to at most {self.max_model_len - 1}",
            param="prompt",
            code="context_length_exceeded",
        )

    def _logits_processors(self, params: SamplingParams, end_ids: list[int]) -> LogitsProcessors | None:
        """None if all have their neutral values: such rows cost the sampler nothing."""
        bias = params.logit_bias or {}
        processors = LogitsProcessors(
            allowed_ids=pack_ids(sorted(set(params.allowed_token_ids or ()))),
            bad_words=[ids for word in params.bad_words or () for ids in self._bad_word_ids(word)],
            min_tokens=params.min_tokens,
            end_ids=end_ids if params.min_tokens else [],
            bias_ids=pack_ids(bias),
            bias_values=[float(value) for value in bias.values()],
            repetition_penalty=float(params.repetition_penalty),
            frequency_penalty=float(params.frequency_penalty),
            presence_penalty=float(params.presence_penalty),
        )
        if processors == _NEUTRAL:
            return None
        self._check_allowed_remain(params, processors)
        return processors

    def _bad_word_ids(self, word: str) -> list[list[int]]:
        """The ids of `word` at the beginning of a text, and after a space."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer to read bad_words with", param="bad_words")
        plain = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        # If the space is a separate token, excluding the rest is enough.
        forms = [plain] if spaced[-len(plain) :] == plain else [plain, spaced]
        if not all(forms):
            raise RequestError(f"bad_words has {word!r}, which has no token", param="bad_words")
        # Ids beyond the model's vocabulary are never sampled.
        return [ids for ids in forms if max(ids) < self._vocab_size]

    def _check_allowed_remain(self, params: SamplingParams, processors: LogitsProcessors) -> None:
        excluded = {ids[0] for ids in processors.bad_words if len(ids) == 1}.union(processors.end_ids)
        allowed: Collection[int] = params.allowed_token_ids or range(self._vocab_size)
        if excluded and len(excluded) >= len(set(allowed)) and excluded.issuperset(allowed):
            raise RequestError(
                "allowed_token_ids has only ids that bad_words or min_tokens exclude: "
                "no token could be generated",
                param="allowed_token_ids",
            )

    def _check_support(self, params: SamplingParams) -> None:
        if params.priority and self._scheduling_policy != "priority":
            raise RequestError(
                f"priority {params.priority} has no effect under --scheduling-policy "
                f"{self._scheduling_policy}: leave it out, or start with --scheduling-policy priority",
                param="priority",
            )
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                "this model has no tokenizer to find stop strings with: use stop_token_ids",
                param="stop_strings",
            )

    def _check_length(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        if max_tokens > self.room(prompt_ids):
            raise RequestError(
                f"the model's maximum context length is {self.max_model_len} tokens, but "
                f"{len(prompt_ids) + max_tokens} were requested: {len(prompt_ids)} in the prompt and "
                f"{max_tokens} to generate; lower max_tokens or shorten the prompt",
                param="max_tokens",
                code="context_length_exceeded",
            )


def _check_unprocessed(
    params: SamplingParams, processors: LogitsProcessors | None, grammar: Grammar | None
) -> None:
    """Raises RequestError for what reads or rules the tokens that are sampled: others are the text."""
    asked = {
        "structured output": grammar is not None,
        "penalties, logit_bias, bad_words, allowed_token_ids and min_tokens": processors is not None,
        "logprobs": params.logprobs is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise RequestError(
                f"{name}: not supported while the server forces the acceptance of drafts "
                "(--spec-decode-acceptance-length or -rate, for benchmarks)",
                code="unsupported_parameter",
            )


def _sampling(params: SamplingParams, seed: int, processors: LogitsProcessors | None) -> Sampling:
    return Sampling(
        temperature=float(params.temperature),
        top_k=max(params.top_k, 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seed=seed,
        logits_processors=processors,
        logprobs=-1 if params.logprobs is None else params.logprobs,
    )


def _unsigned_seed(seed: int | None) -> int:
    return secrets.randbits(64) if seed is None else seed % SEED_LIMIT


def check_size(request: AddRequest) -> None:
    """Raises RequestError for a request that is too large for a frame."""
    size = len(encode(request))
    pixels = request.pixel_bytes
    if size > MAX_FRAME_BYTES - _MARGIN_BYTES:
        raise RequestError(
            f"the images take {pixels} bytes inside the server, three for each pixel, and the request "
            f"{size}, of {MAX_FRAME_BYTES - _MARGIN_BYTES} at most: send fewer or smaller images",
            param="messages",
        )
    if (size := size - pixels) > MAX_ADD_REQUEST_BYTES:
        raise RequestError(
            f"the prompt and its parameters take {size} bytes inside the server, and at most "
            f"{MAX_ADD_REQUEST_BYTES} are possible: send a shorter prompt, or fewer parameters",
            param="prompt",
        )
