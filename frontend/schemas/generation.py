"""What chat and completion requests have in common, and the parts of their answers."""

from typing import Any

import msgspec

__all__ = [
    "HARMLESS",
    "NEUTRAL",
    "GenerationRequest",
    "PromptTokensDetails",
    "StreamOptions",
    "Usage",
]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream reports beside its text."""

    include_usage: bool | None = None
    """One more chunk at the end, with no choices and the whole usage."""
    include_obfuscation: bool | None = None
    """Padding against traffic analysis; only false can be honoured."""
    continuous_usage_stats: bool | None = None
    """Usage in every chunk; only false can be honoured."""


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields honoured by both endpoints; null means absent throughout."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; it wins."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts, and times in seconds since the request arrived."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    ttft_s: float
    """Until the first token."""
    tpot_s: float
    """For each further token of the longest choice."""
    latency_s: float
    """Until the last token."""


HARMLESS = frozenset(
    {
        "client_metadata",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "detokenize": (True,),
    "early_stopping": (False,),
    "ebnf": (),
    "frequency_penalty": (0,),
    "guided_choice": ([],),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "min_tokens": (0,),
    "no_stop_trim": (False,),
    "presence_penalty": (0,),
    "prompt_logprobs": (False,),
    "regex": (),
    "repetition_penalty": (1,),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "rid": (),
    "session_params": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": ({},),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Sampling and serving options of OpenAI, vLLM and SGLang that both endpoints would take."""
