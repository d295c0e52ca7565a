"""What a request is about: its prompts, cut to size, and the names that it goes by."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.detokenizer import Detokenizer
from frontend.errors import RequestError
from frontend.schemas.generation import GenerationRequest
from frontend.serving.caller import REQUEST_ID, Caller
from frontend.tokenizer import Tokenizer

__all__ = ["Prompt", "given_id", "salt", "text_offsets", "truncated"]

_MAX_SALT_LENGTH = 1024


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    ids: list[int]
    echo: str | None = None
    """What `echo` shows of it; None is the text of `ids`."""
    offsets: Sequence[int] = ()
    """Where in `echo` each id's text begins, for requests that want to know."""


def truncated(ids: list[int], request: GenerationRequest, max_model_len: int, answer: int) -> list[int]:
    """The part of `ids` that `truncate_prompt_tokens` leaves; -1 leaves room for `answer` tokens."""
    limit = request.truncate_prompt_tokens
    if limit is None:
        if request.truncation_side is not None:
            raise RequestError("'truncation_side' needs 'truncate_prompt_tokens'", param="truncation_side")
        return ids
    if limit != -1 and not 1 <= limit <= max_model_len:
        raise RequestError(
            f"'truncate_prompt_tokens' must be -1 or in [1, {max_model_len}], not {limit}",
            param="truncate_prompt_tokens",
        )
    keep = max(max_model_len - answer, 1) if limit == -1 else limit
    return ids[:keep] if request.truncation_side == "right" else ids[-keep:]


def text_offsets(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """The characters of text before each id."""
    record: array[int] = array("i")
    detokenizer = Detokenizer(tokenizer, record, skip_special_tokens)
    offsets, total = [], 0
    for token_id in ids:
        record.append(token_id)
        offsets.append(total)
        total += len(detokenizer.feed())
    return offsets


def salt(cache_salt: str | None, caller: Caller) -> str:
    """Sets a caller's cached prompts apart from those of other tenants and other salts.

    Empty, and so shared with all others that are, where there is neither tenant nor salt.
    """
    if cache_salt is not None and not 0 < len(cache_salt) <= _MAX_SALT_LENGTH:
        raise RequestError(
            f"'cache_salt' must have 1 to {_MAX_SALT_LENGTH} characters, not {len(cache_salt)}",
            param="cache_salt",
        )
    if cache_salt is None and not caller.tenant:
        return ""
    # The length tells where the tenant ends, so that no two pairs look the same.
    pair = f"{len(caller.tenant)}:{caller.tenant}{cache_salt or ''}"
    return hashlib.sha256(pair.encode()).hexdigest()


def given_id(request: GenerationRequest, caller: Caller) -> str | None:
    """The client's own name for its request: of the body, else of the header."""
    name = request.request_id
    if name is None:
        return caller.request_id
    if not REQUEST_ID.fullmatch(name):
        raise RequestError(
            "'request_id' must be 1 to 128 letters, digits, dots, colons, hyphens or underscores, "
            "and begin with a letter or a digit",
            param="request_id",
        )
    return name
