"""Prompts of a request: truncation, text offsets, cache salt, request id."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atom.shared.messages.images import PromptImage
from frontend.api.generation.caller import REQUEST_ID, Caller
from frontend.api.generation.sampling import requested_max_tokens
from frontend.api.generation.tag_parts import Format
from frontend.api.schemas.generation import GenerationRequest
from frontend.errors import RequestError
from frontend.images.image_parts import ImageSource
from frontend.text.constraint import Constraint
from frontend.text.detokenizer import Detokenizer
from frontend.text.input_processor import MAX_EXCESS_TOKENS, InputProcessor
from frontend.text.reply_formats.base import ReasoningIds, ReplyFrame, ReplyParser
from frontend.text.tokenizer import Tokenizer

__all__ = ["Prompt", "PromptEncoder", "given_id", "kept_tokens", "salt", "text_offsets", "truncated"]

_MAX_SALT_LENGTH = 1024


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    ids: list[int]
    echo: str | None = None
    """The text for `echo`; None: the decoded `ids`."""
    offsets: Sequence[int] = ()
    """Where in `echo` the text of each id begins; only for requests with echoed log probabilities."""
    reply: Callable[[], ReplyParser] | None = None
    """As in TextOptions."""
    reasoning: ReasoningIds | None = None
    """How the reply marks its reasoning; None: it has none."""
    constraint: Constraint | None = None
    """The tool calls that the reply must have; None: it is free."""
    optional_calls: Format | None = None
    """The tool calls that it may have in place of structured output."""
    frame: ReplyFrame | None = None
    """As in ReplyFormat."""
    sources: Sequence[ImageSource] = ()
    """Images, each of which has one placeholder in `ids`."""
    images: Sequence[PromptImage] = ()
    """The same images once they are prepared; each has as many placeholders as tokens."""

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Rows and columns of the tokens of each prepared image."""
        return [(image.rows, image.columns) for image in self.images]


class PromptEncoder:
    """Encodes the prompts of an endpoint whose max_tokens defaults to `default_max_tokens`."""

    def __init__(self, inputs: InputProcessor, default_max_tokens: int):
        self.default_max_tokens = default_max_tokens
        self._inputs = inputs

    def encode(self, request: GenerationRequest, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a prompt; only a prompt to be truncated may exceed the context length."""
        excess = 0 if request.truncate_prompt_tokens is None else MAX_EXCESS_TOKENS
        return self._inputs.encode(text, add_special_tokens, excess)

    def kept_tokens(self, request: GenerationRequest) -> int | None:
        """How many prompt tokens `truncate_prompt_tokens` keeps; None without truncation."""
        max_tokens = requested_max_tokens(request)
        max_model_len = self._inputs.max_model_len
        if max_tokens is None:  # a default never takes more than half of the context
            max_tokens = min(self.default_max_tokens, max_model_len // 2)
        return kept_tokens(request, max_model_len, max_tokens)


def kept_tokens(request: GenerationRequest, max_model_len: int, max_tokens: int) -> int | None:
    """How many prompt tokens `truncate_prompt_tokens` keeps; None without truncation.

    -1 leaves room for `max_tokens` generated tokens.
    """
    limit = request.truncate_prompt_tokens
    if limit is None:
        if request.truncation_side is not None:
            raise RequestError("'truncation_side' needs 'truncate_prompt_tokens'", param="truncation_side")
        return None
    if limit != -1 and not 1 <= limit <= max_model_len:
        raise RequestError(
            f"'truncate_prompt_tokens' must be -1 or in [1, {max_model_len}], not {limit}",
            param="truncate_prompt_tokens",
        )
    return max(max_model_len - max_tokens, 1) if limit == -1 else limit


def truncated(ids: list[int], kept: int | None, request: GenerationRequest) -> list[int]:
    """`ids` truncated to `kept` ones on the request's side; all for None."""
    if kept is None:
        return ids
    return ids[:kept] if request.truncation_side == "right" else ids[-kept:]


def text_offsets(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """The number of characters before the text of each id."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    offsets = []
    total = 0
    for token_id in ids:
        offsets.append(total)
        total += len(detokenizer.feed(token_id))
    return offsets


def salt(cache_salt: str | None, caller: Caller) -> str:
    """The prefix cache's salt for the tenant and `cache_salt`; empty without both.

    Only requests with equal salts share cached blocks.
    """
    if cache_salt is not None and not 0 < len(cache_salt) <= _MAX_SALT_LENGTH:
        raise RequestError(
            f"'cache_salt' must have 1 to {_MAX_SALT_LENGTH} characters, not {len(cache_salt)}",
            param="cache_salt",
        )
    if cache_salt is None and not caller.tenant:
        return ""
    # The length marks the end of the tenant, so that different pairs give different strings.
    pair = f"{len(caller.tenant)}:{caller.tenant}{cache_salt or ''}"
    return hashlib.sha256(pair.encode()).hexdigest()


def given_id(request: GenerationRequest, caller: Caller) -> str | None:
    """The client's request id: from the body, else from the header."""
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
