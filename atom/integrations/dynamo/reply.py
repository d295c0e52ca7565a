"""Updates of our engine as the chunks that Dynamo's frontend reads."""

from collections.abc import Iterable
from typing import Any

from frontend.text.output_processor import SequenceOutput
from frontend.text.token_logprobs import TokenLogprob

_REASONS = {"eos": "stop", "max_tokens": "length", "aborted": "cancelled"}


class Reply:
    """The chunks of one request; sequence i of `request_ids` is choice i."""

    def __init__(self, request_ids: list[int], num_prompt_tokens: int, tokens_as_ids: bool):
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._num_prompt_tokens = num_prompt_tokens
        self._tokens_as_ids = tokens_as_ids
        self._counts = dict.fromkeys(request_ids, 0)
        self._cached = dict.fromkeys(request_ids, 0)
        self._prompt_logprobs: dict[int, list[Any]] = {}

    def chunk(self, update: SequenceOutput) -> dict[str, Any]:
        """The new ids of one sequence, with the finish reason and the usage at its end."""
        request_id = update.request_id
        self._counts[request_id] += len(update.token_ids)
        self._cached[request_id] += update.cached_tokens
        chunk: dict[str, Any] = {"token_ids": update.token_ids.tolist(), "index": self._index[request_id]}
        if update.logprobs:
            chunk["log_probs"] = [entry.logprob for entry in update.logprobs]
            chunk["top_logprobs"] = [self._position(entry) for entry in update.logprobs]
        if update.prompt_logprobs:
            self._prompt_logprobs[request_id] = self._prompt(update.prompt_logprobs)
        if update.finished:
            assert update.reason is not None
            chunk["finish_reason"] = _REASONS.get(update.reason, "stop")
            chunk["completion_usage"] = self._usage(request_id)
            if isinstance(update.stop_reason, int):
                chunk["stop_reason"] = update.stop_reason
            if (found := self._prompt_logprobs.pop(request_id, None)) is not None:
                chunk["engine_data"] = {"prompt_logprobs": found}
        return chunk

    def _usage(self, request_id: int) -> dict[str, Any]:
        completion = self._counts[request_id]
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._num_prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached[request_id]},
        }

    def _position(self, entry: TokenLogprob) -> list[dict[str, Any]]:
        """The top tokens of a position, and the sampled one where it is none of them."""
        pairs = [(rank, token_id, value) for rank, (token_id, value) in enumerate(entry.top, 1)]
        if all(token_id != entry.token_id for _, token_id, _ in pairs):
            pairs.append((entry.rank, entry.token_id, entry.logprob))
        return [
            {"rank": rank, "token_id": token_id, "token": self._name(token_id), "logprob": value}
            for rank, token_id, value in pairs
        ]

    def _prompt(self, entries: Iterable[TokenLogprob]) -> list[Any]:
        """Log probabilities of each token of the prompt; null for the first."""
        positions: list[Any] = [None]
        for entry in entries:
            ranked = {str(token_id): (rank, value) for rank, (token_id, value) in enumerate(entry.top, 1)}
            ranked[str(entry.token_id)] = (entry.rank, entry.logprob)
            positions.append({key: {"logprob": value, "rank": rank} for key, (rank, value) in ranked.items()})
        return positions

    def _name(self, token_id: int) -> str | None:
        """The frontend writes the token's text where there is none."""
        return f"token_id:{token_id}" if self._tokens_as_ids else None
