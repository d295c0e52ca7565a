"""Bounds on a JSON text, checked before it is parsed.

A parser call holds the GIL until it returns. Its time depends on the size of the text and on the number
of strings, arrays, objects and values, so these are bounded first, with byte counts at memory speed.
"""

from frontend.errors import RequestError

__all__ = ["MAX_CONTAINERS", "MAX_STRINGS", "MAX_VALUES", "check_structure"]

MAX_STRINGS = 1 << 16
"""Names and string values."""
MAX_CONTAINERS = 1 << 16
"""Arrays and objects."""
MAX_VALUES = 1 << 19
"""Elements of arrays and fields of objects, such as prompt token ids."""

# Shorter texts cannot exceed the limits by enough to matter.
_SMALL = 1 << 16


def check_structure(text: bytes, field: str | None = None) -> None:
    """Raises RequestError if `text` has too many strings, arrays, objects or values.

    `field` is the path of JSON text inside a request; None is the whole body.
    """
    if len(text) <= _SMALL or _is_within(text, text):
        return
    # The counts include characters inside strings. Without escapes, each quote begins or ends a string,
    # and every second part between quotes is outside of strings.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    where = "the body" if field is None else f"'{field}'"
    if plain.count(b'"') > 2 * MAX_STRINGS:
        raise RequestError(f"{where} has more than {MAX_STRINGS} strings and field names: send fewer", field)
    outside = b"".join(plain.split(b'"')[::2])
    if not _is_within(outside, plain):
        raise RequestError(
            f"{where} has more than {MAX_CONTAINERS} arrays and objects, or more than {MAX_VALUES} values: "
            "send several smaller requests",
            field,
        )


def _is_within(outside: bytes, text: bytes) -> bool:
    return (
        _quotes(text) <= 2 * MAX_STRINGS
        and outside.count(b"[") + outside.count(b"{") <= MAX_CONTAINERS
        and outside.count(b",") <= MAX_VALUES
    )


def _quotes(text: bytes) -> int:
    """At least the number of quotes that begin or end a string."""
    count = text.count(b'"')
    if count <= 2 * MAX_STRINGS:
        return count
    return count - text.count(b'\\"') + text.count(b'\\\\"')
