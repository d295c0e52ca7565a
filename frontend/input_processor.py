"""From a prompt to the core's request: every bound is checked here, before any message."""

import secrets
from collections.abc import Sequence

from atom.config.checkpoint import Checkpoint
from atom.messages.engine import AddRequest, Sampling, pack_ids
from atom.sampling_params import SEED_LIMIT, SamplingParams
from frontend.errors import RequestError
from frontend.tokenizer import Tokenizer

__all__ = ["InputProcessor"]


class InputProcessor:
    """Knows the limits of one model. `max_model_len` may be lowered once the core told it.

    `scheduling_policy` is the core's: only one of them has a use for priorities.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        scheduling_policy: str,
    ):
        self.max_model_len = max_model_len
        self._scheduling_policy = scheduling_policy
        self._tokenizer = tokenizer
        self._vocab_size = checkpoint.vocab_size
        self._eos_token_ids = list(checkpoint.eos_token_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text prompt. Raises RequestError where the model has no tokenizer."""
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer: send the prompt as token ids", param="prompt")
        return self._tokenizer.encode(text, add_special_tokens)

    def room(self, prompt_ids: Sequence[int]) -> int:
        """Tokens that fit behind this prompt; raises RequestError when none does."""
        if not prompt_ids:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise RequestError(
                f"the model's maximum context length is {self.max_model_len} tokens, and the prompt "
                f"alone has {len(prompt_ids)}: shorten it to at most {self.max_model_len - 1}",
                param="prompt",
                code="context_length_exceeded",
            )
        return room

    def requests(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_ids: Sequence[int]
    ) -> list[AddRequest]:
        """One request for each id: the choices of one prompt, which differ in `choice` only.

        Raises RequestError for ids outside the vocabulary, lengths beyond the model's, and what
        this engine has no means for.
        """
        self._check_means(params)
        self._check_length(prompt_ids, params.max_tokens)
        self._check_vocabulary(prompt_ids, "prompt")
        stop_token_ids = list(params.stop_token_ids or ())
        if stop_token_ids:
            self._check_vocabulary(stop_token_ids, "stop_token_ids")
        packed = pack_ids(prompt_ids)
        seed = _unsigned_seed(params.seed)
        return [
            AddRequest(
                request_id,
                packed,
                params.max_tokens,
                _sampling(params, seed, choice),
                eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
                stop_token_ids=stop_token_ids,
                priority=params.priority,
            )
            for choice, request_id in enumerate(request_ids)
        ]

    def _check_means(self, params: SamplingParams) -> None:
        if params.priority and self._scheduling_policy != "priority":
            raise RequestError(
                f"priority {params.priority} has no effect under --scheduling-policy "
                f"{self._scheduling_policy}: leave it out, or start with --scheduling-policy priority",
                param="priority",
            )
        if params.stop_strings and self._tokenizer is None:
            raise RequestError(
                "this model has no tokenizer to find stop strings with: use stop_token_ids",
                param="stop_strings",
            )

    def _check_length(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        if max_tokens > self.room(prompt_ids):
            raise RequestError(
                f"the model's maximum context length is {self.max_model_len} tokens, but "
                f"{len(prompt_ids) + max_tokens} were asked for: {len(prompt_ids)} in the prompt and "
                f"{max_tokens} to generate; lower max_tokens or shorten the prompt",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _check_vocabulary(self, ids: Sequence[int], param: str) -> None:
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"token id {token_id} in {param} is outside the vocabulary: "
                    f"ids go from 0 to {self._vocab_size - 1}",
                    param=param,
                )


def _sampling(params: SamplingParams, seed: int, choice: int) -> Sampling:
    return Sampling(
        temperature=float(params.temperature),
        top_k=max(params.top_k, 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seed=seed,
        choice=choice,
    )


def _unsigned_seed(seed: int | None) -> int:
    return secrets.randbits(64) if seed is None else seed % SEED_LIMIT
