"""Items of /v1/responses that name an item of a stored response instead of repeating it."""

from collections.abc import Sequence

import msgspec

from frontend.api.responses.response_store import ResponseStore
from frontend.errors import RequestError

__all__ = ["ItemReferences"]

_KIND = "item_reference"


class _Item(msgspec.Struct):
    type: str | None = None
    id: str = ""


class _Body(msgspec.Struct):
    output: list[msgspec.Raw]


_item = msgspec.json.Decoder(_Item)
_body = msgspec.json.Decoder(_Body)


class ItemReferences:
    """The references of one request, by their position in the input."""

    def __init__(self, items: Sequence[msgspec.Raw], store: ResponseStore, tenant: str):
        """Raises RequestError for a reference to a response that is not stored."""
        self._items = items
        self._places: dict[int, tuple[str, str]] = {}
        self._bodies: dict[str, bytes] = {}
        for index, raw in enumerate(items):
            if _KIND.encode() not in bytes(raw):
                continue
            item = _decoded(raw)
            if item.type != _KIND:
                continue
            # A renderer makes the ids: a prefix, the id of the response, the position in its output.
            name, _, place = item.id.partition("_")[2].rpartition("_")
            response_id = f"resp_{name}"
            self._places[index] = response_id, place
            stored = store.find(tenant, response_id, f"input[{index}]")
            if stored is None:
                raise RequestError(
                    f"'input[{index}]' refers to the item {item.id!r:.140}, which no stored response has, or "
                    "no longer: send the item itself",
                    param=f"input[{index}]",
                    status=404,
                    code="response_not_found",
                )
            self._bodies[response_id] = stored.body

    @property
    def size(self) -> int:
        """The bytes to read for `resolved`."""
        return sum(map(len, self._bodies.values()))

    def resolved(self) -> list[msgspec.Raw]:
        """The items, with those that references name. Raises RequestError for an unknown one."""
        outputs = {response_id: _body.decode(body).output for response_id, body in self._bodies.items()}
        items = list(self._items)
        for index, (response_id, place) in self._places.items():
            output = outputs[response_id]
            if not (place.isascii() and place.isdigit() and len(place) < 9 and int(place) < len(output)):
                field = f"input[{index}]"
                raise RequestError(f"'{field}' names no item of the response {response_id!r:.140}", field)
            items[index] = output[int(place)]
        return items


def _decoded(raw: msgspec.Raw) -> _Item:
    try:
        return _item.decode(raw)
    except msgspec.ValidationError:  # reading the items tells what is wrong
        return _Item()
