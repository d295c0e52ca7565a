"""Checks of requests at the core, so that no request can harm others.

Frontends check more, for example the vocabulary, and send errors to clients. A request that gets past
them must fail alone: a value that does not fit the workers' arrays would end the engine.
"""

from atom.shared.messages.engine import ID_BYTES, MAX_SEQUENCES, AddRequest, LogitsProcessors, Sampling
from atom.shared.messages.grammar import MAX_GRAMMAR_MEMORY, Grammar
from atom.shared.sampling_params import MAX_LOGPROBS

_MAX_INT32 = (1 << 31) - 1
_MAX_KEY_BYTES = 64
_MAX_UINT64 = (1 << 64) - 1
_MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
_MIN_FLOAT32 = 2.0**-126
"""The smallest one above zero with full precision."""


def check_request(message: AddRequest, max_model_len: int) -> None:
    """Raises ValueError, with the reason, for a request that can never run."""
    count = len(message.request_ids)
    if not 1 <= count <= MAX_SEQUENCES or len(set(message.request_ids)) < count:
        raise ValueError(f"a request needs 1 to {MAX_SEQUENCES} different ids, not {count}")
    if len(message.prompt_ids) % ID_BYTES:
        raise ValueError(f"prompt of {len(message.prompt_ids)} bytes is not a whole number of token ids")
    num_tokens = len(message.prompt_ids) // ID_BYTES
    prompt = message.num_prompt_ids
    if num_tokens < 1 or message.max_tokens < 1:
        raise ValueError("a request needs a prompt and max_tokens of at least 1")
    if not 1 <= prompt <= num_tokens < prompt + message.max_tokens:
        raise ValueError(
            f"{num_tokens} ids, {prompt} of them the prompt, leave nothing of "
            f"max_tokens={message.max_tokens} to generate"
        )
    if prompt + message.max_tokens > max_model_len:
        raise ValueError(
            f"a prompt of {prompt} tokens and max_tokens={message.max_tokens} "
            f"exceed the context of {max_model_len} tokens"
        )
    if len(message.prediction_ids) % 4 or len(message.prediction_ids) > 4 * max_model_len:
        raise ValueError(
            f"a prediction of {len(message.prediction_ids)} bytes is not 0 to {max_model_len} token ids"
        )
    if message.grammar is not None:
        _check_grammar(message.grammar)
    _check_range("prompt_logprobs", message.prompt_logprobs, -1, MAX_LOGPROBS)
    _check_sampling(message.sampling)
    if message.sampling.logits_processors is not None:
        _check_processors(message.sampling.logits_processors)


def _check_sampling(sampling: Sampling) -> None:
    _check_range("temperature", sampling.temperature, 0.0, _MAX_FLOAT32)
    _check_range("top_k", sampling.top_k, 0, _MAX_INT32)
    _check_range("top_p", sampling.top_p, 0.0, 1.0)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("seed", sampling.seed, 0, _MAX_UINT64)
    _check_range("sequence", sampling.sequence, 0, _MAX_INT32 - MAX_SEQUENCES)
    _check_range("logprobs", sampling.logprobs, -1, MAX_LOGPROBS)


def _check_grammar(grammar: Grammar) -> None:
    _check_range("memory of a grammar", grammar.memory, 0, MAX_GRAMMAR_MEMORY)
    if not 0 < len(grammar.row.key) <= _MAX_KEY_BYTES:
        raise ValueError(f"the key of a grammar has {len(grammar.row.key)} bytes")
    for token_id in grammar.row.stop_ids:
        _check_range("stop ids of a grammar", token_id, 0, _MAX_INT32)
    _check_range("reasoning_begin", grammar.row.reasoning_begin, -1, _MAX_INT32)
    _check_range("reasoning_end", grammar.row.reasoning_end, -1, _MAX_INT32)


def _check_processors(processors: LogitsProcessors) -> None:
    if len(processors.allowed_ids) % 4:
        raise ValueError(
            f"allowed_ids of {len(processors.allowed_ids)} bytes are not a whole number of token ids"
        )
    if len(processors.bias_ids) != 4 * len(processors.bias_values):
        raise ValueError(
            f"{len(processors.bias_values)} bias_values do not match "
            f"bias_ids of {len(processors.bias_ids)} bytes"
        )
    if not all(processors.bad_words):
        raise ValueError("a sequence of bad_words is empty")
    _check_range("min_tokens", processors.min_tokens, 0, _MAX_INT32)
    _check_range("repetition_penalty", processors.repetition_penalty, _MIN_FLOAT32, _MAX_FLOAT32)
    _check_range("frequency_penalty", processors.frequency_penalty, -_MAX_FLOAT32, _MAX_FLOAT32)
    _check_range("presence_penalty", processors.presence_penalty, -_MAX_FLOAT32, _MAX_FLOAT32)
    for bias in processors.bias_values:
        _check_range("bias_values", bias, -_MAX_FLOAT32, _MAX_FLOAT32)
    for token_id in [*processors.end_ids, *(one for sequence in processors.bad_words for one in sequence)]:
        _check_range("end_ids and bad_words", token_id, 0, _MAX_INT32)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # so written, NaN is outside
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], not {value}")
