"""The items that a stored response was made from, a page at a time, in OpenAI's format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from frontend.api.responses.response_store import StoredResponse
from frontend.errors import RequestError

__all__ = ["INCLUDED", "InputItems", "Page", "input_items"]

_MOST = 100
INCLUDED = ("include", "include[]")
"""Parameters without effect: what they may ask for is there anyway."""


class InputItems(msgspec.Struct, frozen=True):
    """A page of items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class _Output(msgspec.Struct):
    output: list[msgspec.Raw]


class _Named(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw()


_output = msgspec.json.Decoder(_Output)
_items = msgspec.json.Decoder(
    list[msgspec.Raw]
)  # in one call that holds the lock of all threads: a short one
_named = msgspec.json.Decoder(_Named)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Page:
    """Which items are wanted."""

    limit: int = 20
    is_ascending: bool = False
    after: str = ""
    """The id of the item before the first one; empty: from the beginning."""

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "Page":
        """From the parameters of a URL. Raises RequestError."""
        for name in query:
            if name not in ("limit", "order", "after", *INCLUDED):
                raise RequestError(
                    f"unknown parameter {name!r:.80}: there are 'limit', 'order' and 'after'", param=name
                )
        limit = query.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MOST):
            raise RequestError(f"'limit' must be from 1 to {_MOST}, not {limit!r:.80}", param="limit")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"'order' must be 'asc' or 'desc', not {order!r:.80}", param="order")
        return cls(int(limit), order == "asc", query.get("after", ""))


def input_items(response_id: str, stored: StoredResponse, page: Page) -> bytes:
    """The page, as JSON: of the whole conversation before the response, with earlier responses.

    Items without an id get one. Raises RequestError for an `after` that is no item's id.
    """
    items = _items.decode(stored.items.decode(errors="replace"))  # of fields that were left out, too
    del items[len(items) - len(_output.decode(stored.body).output) :]
    name = response_id.partition("_")[2]
    ids = [_text(_named.decode(item).id) or f"msg_{name}_input_{index}" for index, item in enumerate(items)]
    places = list(range(len(items)) if page.is_ascending else reversed(range(len(items))))
    if page.after:
        found = next((number for number, place in enumerate(places) if ids[place] == page.after), None)
        if found is None:
            raise RequestError(f"'after' names no item of the input: {page.after!r:.140}", param="after")
        del places[: found + 1]
    wanted = places[: page.limit]
    return msgspec.json.encode(
        InputItems(
            data=[_complete(_fields.decode(items[place]), ids[place]) for place in wanted],
            first_id=ids[wanted[0]] if wanted else None,
            last_id=ids[wanted[-1]] if wanted else None,
            has_more=len(places) > len(wanted),
        )
    )


def _complete(item: Mapping[str, msgspec.Raw], item_id: str) -> dict[str, Any]:
    """An item with what clients may leave out: id, type and status, and the parts of a message's text."""
    whole: dict[str, Any] = {"type": "message", "status": "completed", **item, "id": item_id}
    if content := _text(item.get("content")):
        is_reply = _text(item.get("role")) == "assistant"
        part = {"type": "output_text", "annotations": []} if is_reply else {"type": "input_text"}
        whole["content"] = [part | {"text": content}]
    return whole


def _text(field: msgspec.Raw | None) -> str:
    """A field that is a text; empty for others."""
    raw = bytes(field or b"")
    return msgspec.json.decode(raw, type=str) if raw[:1] == b'"' else ""
