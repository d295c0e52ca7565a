"""Fields that chat and completion requests share, and parts of their responses."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.api.schemas.fields import Schema
from frontend.api.schemas.kv_transfer import KV_TRANSFER_PARAMS, KVTransferParams
from frontend.api.schemas.structured_output import (
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    ResponseFormat,
    StructuredOutputs,
)

__all__ = [
    "HARMLESS",
    "HARMLESS_TYPES",
    "NESTED",
    "NEUTRAL",
    "CompletionTokensDetails",
    "GenerationRequest",
    "Metadata",
    "Prediction",
    "PromptLogprob",
    "PromptTokensDetails",
    "RankedLogprob",
    "StreamOptions",
    "Usage",
]


class StreamOptions(msgspec.Struct, frozen=True):
    """Additional contents of a stream."""

    include_usage: bool | None = None
    """Send a last chunk without choices and with the total usage."""
    include_obfuscation: bool | None = None
    """Padding against traffic analysis; only false is supported."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every chunk."""


class PredictionPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the predicted text."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, frozen=True):
    """Text that the client expects in the response: a source of draft tokens, no condition."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields supported by both endpoints; null means absent."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; takes precedence."""
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
    data_parallel_rank: int | None = None
    """The engine that serves the request; takes precedence over the X-Data-Parallel-Rank header."""
    timeout: float | None = None
    """Seconds until the request is ended; takes precedence over the X-Request-Timeout header."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """By token id in decimal digits."""
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | bool | None = None
    """Number of top tokens per prompt token; false is off."""
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    echo: bool | None = None
    """Completions begin with their prompt, chat replies with the last message if its role is
    assistant."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Logprobs identify tokens as `token_id:<id>`."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Keep at most this many prompt tokens; -1 keeps what leaves room for the generated tokens."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that is cut; defaults to left, which keeps the end of the prompt."""
    cache_salt: str | None = None
    """Requests share prefix-cache blocks only with requests of the same salt."""
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    """Plain text, any JSON object, JSON of a schema, or text with a structural tag."""
    structured_outputs: StructuredOutputs | None = None
    """JSON of a schema, a regular expression, a choice of texts, a grammar or a structural tag."""
    guided_json: dict[str, Any] | str | None = None
    """Older name of `structured_outputs.json`; the other three are alike."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    kv_transfer_params: KVTransferParams | None = None
    """Hands a prompt over to another server, or takes one over."""
    request_id: str | None = None
    """Becomes part of the response id; takes precedence over the X-Request-Id header."""


class RankedLogprob(msgspec.Struct, frozen=True):
    """One candidate token at a prompt position."""

    logprob: float
    rank: int
    """1 for the most likely."""
    decoded_token: str | None
    """None where the model has no tokenizer."""


PromptLogprob = dict[str, RankedLogprob]
"""By token id: first the prompt token itself, then the top tokens."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens by origin."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Generated tokens by kind, and draft tokens of speculative decoding."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """If draft tokens were verified, whether from the prediction or from other text."""
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts, and times in seconds since the request arrived."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """If there was reasoning, or draft tokens were verified."""
    ttft_s: float
    """Time to the first token."""
    tpot_s: float
    """Time per further token of the longest choice."""
    latency_s: float
    """Time to the last token."""


NESTED: dict[str, Schema[Any] | None] = {
    "guided_json": None,
    "kv_transfer_params": KV_TRANSFER_PARAMS,
    "logit_bias": None,
    "prediction": Schema(Prediction, neutral={}, harmless=frozenset()),
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED_OUTPUTS,
    "stream_options": Schema(StreamOptions, neutral={}, harmless=frozenset()),
}
"""Fields of both endpoints that hold an object, with its schema."""

HARMLESS = frozenset(
    {
        "client_metadata",
        "metadata",
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

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
"""`metadata` with OpenAI's limits."""
HARMLESS_TYPES = {"metadata": msgspec.json.Decoder(Metadata | None)}
"""Types of harmless fields that OpenAI limits."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "custom_logit_processor": (),
    "custom_params": ({},),
    "detokenize": (True,),
    "early_stopping": (False,),
    "ebnf": (),
    "guided_decoding_backend": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": (),
    "return_hidden_states": (False,),
    "rid": (),
    "session_params": ({},),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Unsupported options of OpenAI, vLLM and SGLang, with the neutral values besides null that are accepted."""
