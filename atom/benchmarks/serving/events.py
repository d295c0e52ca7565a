"""What one event of a stream, or one whole answer, says: the answer formats of the backends.

Decoding goes into typed structs that skip every field that is not looked at, which costs about a
microsecond an event. Raises msgspec.DecodeError for what is no such answer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

__all__ = ["Part", "chat", "completions", "deepspeed_mii", "tensorrt_llm", "tgi"]

T = TypeVar("T")


class Part(NamedTuple):
    """What an event adds to an answer."""

    text: str | None
    """New text, perhaps empty; None when the event brings no token."""
    output_tokens: int | None = None
    """The server's own count of the whole answer."""
    error: str = ""


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None


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


_completion, _chat = _decoder(_Completion), _decoder(_Chat)
_tgi, _tensorrt, _mii = _decoder(_Tgi), _decoder(_TensorRt), _decoder(_Mii)


def completions(event: bytes) -> Part:
    """/v1/completions: a choice is a token even when its text is empty."""
    found = _completion(event)
    text = (found.choices[0].text or "") if found.choices else None
    return Part(text, _counted(found.usage), _message(found.error))


def chat(event: bytes) -> Part:
    """/v1/chat/completions: a delta that only names the role comes before the first token."""
    found = _chat(event)
    delta = found.choices[0].delta if found.choices else None
    text = None
    if delta is not None:
        text = delta.content or delta.reasoning_content or delta.reasoning or ""
        if not text and delta.role is not None:
            text = None
    return Part(text, _counted(found.usage), _message(found.error))


def tgi(event: bytes) -> Part:
    """/generate_stream: one token an event, and the count in the last one's details."""
    found = _tgi(event)
    counted = found.details.generated_tokens if found.details else None
    return Part(found.token.text if found.token else None, counted, _message(found.error))


def tensorrt_llm(event: bytes) -> Part:
    """/generate_stream of the Triton server in front of TensorRT-LLM."""
    found = _tensorrt(event)
    return Part(found.text_output, None, _message(found.error))


def deepspeed_mii(answer: bytes) -> Part:
    """A whole answer, which is all that this backend gives."""
    found = _mii(answer)
    texts = found.text if isinstance(found.text, list) else [found.text]
    text = found.choices[0].text if found.choices else next(iter(texts), None)
    return Part(text, _counted(found.usage), _message(found.error))


def _counted(usage: _Usage | None) -> int | None:
    return usage.completion_tokens if usage else None


def _message(error: Any) -> str:
    """An error object's message, or all of it."""
    if not error:
        return ""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
