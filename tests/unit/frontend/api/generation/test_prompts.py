"""What sets requests apart, and what is left of long prompts."""

from typing import Literal

import pytest

from frontend.api.generation.caller import Caller
from frontend.api.generation.prompts import given_id, kept_tokens, salt, text_offsets, truncated
from frontend.api.schemas.generation import GenerationRequest
from frontend.errors import RequestError
from tests.helpers.checkpoints import tiny_tokenizer

TOKENIZER = tiny_tokenizer.tokenizer()


def test_salts_differ_where_tenant_or_salt_do() -> None:
    pairs = [("", "a"), ("a", None), ("a", "b"), ("ab", None), ("", "ab"), ("1:a", "b"), ("b", "a")]
    salts = {salt(given, Caller(tenant)) for tenant, given in pairs}
    assert len(salts) == len(pairs)
    assert "" not in salts
    assert salt(None, Caller()) == ""
    assert salt("b", Caller("a")) == salt("b", Caller("a", request_id="x"))


def test_the_bodys_name_wins_over_the_headers() -> None:
    caller = Caller(request_id="header")
    assert given_id(GenerationRequest(), Caller()) is None
    assert given_id(GenerationRequest(), caller) == "header"
    assert given_id(GenerationRequest(request_id="body"), caller) == "body"
    for bad in ("a/b", "-a", "", "a" * 129):
        with pytest.raises(RequestError, match="'request_id' must be 1 to 128 letters"):
            given_id(GenerationRequest(request_id=bad), caller)


@pytest.mark.parametrize(
    ("limit", "side", "kept"),
    [
        (None, None, [1, 2, 3, 4, 5, 6]),
        (4, None, [3, 4, 5, 6]),
        (4, "left", [3, 4, 5, 6]),
        (4, "right", [1, 2, 3, 4]),
        (9, None, [1, 2, 3, 4, 5, 6]),
        (-1, None, [2, 3, 4, 5, 6]),
    ],
)
def test_truncation(limit: int | None, side: Literal["left", "right"] | None, kept: list[int]) -> None:
    request = GenerationRequest(truncate_prompt_tokens=limit, truncation_side=side)
    count = kept_tokens(request, max_model_len=10, max_tokens=5)
    assert truncated([1, 2, 3, 4, 5, 6], count, request) == kept


def test_offsets_are_where_texts_begin() -> None:
    text = "Hello 🦊 world"
    ids = [0, *TOKENIZER.encode(text, add_special_tokens=False)]
    offsets = text_offsets(TOKENIZER, ids, skip_special_tokens=True)
    assert offsets[:2] == [0, 0]  # the special token has no text
    for token_id, offset in zip(ids[1:], offsets[1:], strict=True):
        token = TOKENIZER.token_text(token_id)
        assert "\ufffd" in token or text[offset:].startswith(token)
