"""Reads the response formats of the backends: one event of a stream, or a whole response.

Typed structs skip unused fields, which takes about a microsecond per event. Raises
msgspec.DecodeError for anything else.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

__all__ = ["Part", "chat", "completions", "deepspeed_mii", "tensorrt_llm", "tgi"]

T = TypeVar("T")


class Part(NamedTuple):
    """What an event adds to a response."""

    text: str | None
    """New text, perhaps empty; None if the event has no token."""
    output_tokens: int | None = None
    """The server's own count for the whole response."""
    error: str = ""
    prompt_tokens: int | None = None
    """The server's own count."""
    cached_tokens: int | None = None
    """Prompt tokens that were in the server's prefix cache."""


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _CompletionChoice(msgspec.Struct, gc=False):
    text: str | None = None


class _Completion(msgspec.Struct, gc=False):
    choices: list[_CompletionChoice] = []
    usage: _Usage | None = None
    error: Any = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    role: str | None = None


class _ChatChoice(msgspec.Struct, gc=False):
    delta: _Delta | None = None


class _Chat(msgspec.Struct, gc=False):
    choices: list[_ChatChoice] = []
    usage: _Usage | None = None
    error: Any = None


class _TgiToken(msgspec.Struct, gc=False):
    text: str = ""


class _TgiDetails(msgspec.Struct, gc=False):
    generated_tokens: int | None = None


class _Tgi(msgspec.Struct, gc=False):
    token: _TgiToken | None = None
    details: _TgiDetails | None = None
    error: Any = None


class _TensorRt(msgspec.Struct, gc=False):
    text_output: str | None = None
    error: Any = None


class _Mii(msgspec.Struct, gc=False):
    text: str | list[str] | None = None
    choices: list[_CompletionChoice] = []
    usage: _Usage | None = None
    error: Any = None


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    return msgspec.json.Decoder(kind).decode


_completion = _decoder(_Completion)
_chat = _decoder(_Chat)
_tgi = _decoder(_Tgi)
_tensorrt = _decoder(_TensorRt)
_mii = _decoder(_Mii)


def completions(event: bytes) -> Part:
    """/v1/completions: an event with a choice is a token, even if its text is empty."""
    found = _completion(event)
    text = (found.choices[0].text or "") if found.choices else None
    return _part(text, found.usage, found.error)


def chat(event: bytes) -> Part:
    """/v1/chat/completions: a delta with only a role comes before the first token."""
    found = _chat(event)
    delta = found.choices[0].delta if found.choices else None
    text = None
    if delta is not None:
        text = delta.content or delta.reasoning_content or delta.reasoning or ""
        if not text and delta.role is not None:
            text = None
    return _part(text, found.usage, found.error)


def tgi(event: bytes) -> Part:
    """/generate_stream of TGI: one token per event; the last event has the count."""
    found = _tgi(event)
    counted = found.details.generated_tokens if found.details else None
    return Part(found.token.text if found.token else None, counted, _message(found.error))


def tensorrt_llm(event: bytes) -> Part:
    """/generate_stream of the Triton server in front of TensorRT-LLM."""
    found = _tensorrt(event)
    return Part(found.text_output, None, _message(found.error))


def deepspeed_mii(response: bytes) -> Part:
    """A whole response; this backend does not stream."""
    found = _mii(response)
    texts = found.text if isinstance(found.text, list) else [found.text]
    text = found.choices[0].text if found.choices else next(iter(texts), None)
    return Part(text, _counted(found.usage), _message(found.error))


def _part(text: str | None, usage: _Usage | None, error: Any) -> Part:
    if usage is None:
        return Part(text, error=_message(error))
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else None
    return Part(text, usage.completion_tokens, _message(error), usage.prompt_tokens, cached)


def _counted(usage: _Usage | None) -> int | None:
    return usage.completion_tokens if usage else None


def _message(error: Any) -> str:
    """The message of an error object, or its whole text."""
    if not error:
        return ""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
