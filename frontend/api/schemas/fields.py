"""Decoding of JSON objects with a rule for every field.

Fields of the Struct are supported. Harmless fields cannot change the output and are accepted. All
other fields are refused unless their value is null or neutral. No field is dropped silently: with
--lenient-fields, dropped fields are listed in the response's `warnings`.
"""

import contextlib
import heapq
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from frontend.api.schemas.structure import check_structure
from frontend.errors import RequestError

__all__ = ["Schema", "check_unique", "kind_of", "type_of"]

T = TypeVar("T", bound=msgspec.Struct)

_raw_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
# Far more than any object has fields; logit_bias may have 1,024.
_MAX_NAMES = 2048
_MAX_NAME_LENGTH = 1024
# Only the first refused fields are reported, so that an error costs little.
_MAX_REPORTED = 8
# Neutral values are short; a longer value need not be parsed.
_MAX_NEUTRAL_BYTES = 64
_NULL = b"null"
_SMALL = 4096
_LARGE = 1 << 16
# Parsing holds the GIL for milliseconds per MiB: only one thread at a time parses a large body, so that
# the event loop waits for at most one.
_one_large_body = threading.Lock()
_INTEGRAL = re.compile(rb"(-?\d{1,20})\.0{1,20}")
_NAME = re.compile(rb'[\s{,]*+("(?:[^"\\]++|\\.)*+")\s*+:\s*+')
_END = re.compile(rb"[\s{]*+\}")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")


@dataclass(frozen=True)
class Schema(Generic[T]):
    """The fields of one kind of JSON object."""

    struct: type[T]
    neutral: Mapping[str, tuple[Any, ...]]
    """Unsupported fields that get a specific message, with the values besides null that are accepted."""
    harmless: frozenset[str]
    nested: Mapping[str, "Schema[Any] | None"] = field(default_factory=dict)
    """Supported fields that hold an object, with its schema; None for any unique names."""
    harmless_types: Mapping[str, Any] = field(default_factory=dict)
    """Harmless fields whose type is checked, with a decoder."""
    state: frozenset[str] = frozenset()
    """Unsupported fields that stand for an earlier conversation: never left out."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """What to send in place of an unsupported field."""

    def decode(self, body: bytes, lenient: bool, where: str = "") -> tuple[T, list[str]]:
        """(the object, warnings). Raises RequestError naming the field at fault.

        `where` is the path of the object in the request, a prefix of field names in errors.
        """
        with _one_large_body if len(body) > _LARGE else contextlib.nullcontext():
            check_structure(body)
            return self._decode(body, lenient, where)

    def _decode(self, body: bytes, lenient: bool, where: str) -> tuple[T, list[str]]:
        try:
            raw = _raw_object.decode(body)
            warnings = self._check(body, raw, lenient, where)
            return self._convert(body, raw), warnings
        except msgspec.ValidationError as error:
            raise _type_error(error, where) from None
        except UnicodeDecodeError as error:
            wrong = f"a text has the byte 0x{error.object[error.start]:02x}, not UTF-8"
            raise RequestError(f"the body is not valid JSON: {wrong}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None

    @cached_property
    def _accepted(self) -> frozenset[str]:
        """Fields accepted with any value of the right type."""
        return self.harmless.union(self.struct.__struct_fields__)

    def _convert(self, body: bytes, raw: dict[str, msgspec.Raw]) -> T:
        try:
            return msgspec.json.decode(body, type=self.struct)
        except msgspec.ValidationError:
            found = {name: _INTEGRAL.fullmatch(value) for name, value in raw.items()}
            integral = {name: msgspec.Raw(match[1]) for name, match in found.items() if match}
            if not integral:
                raise
        # An integer written as a float, such as 16.0, is accepted as in other servers.
        return msgspec.json.decode(msgspec.json.encode(raw | integral), type=self.struct)

    def _check(self, body: bytes, raw: dict[str, msgspec.Raw], lenient: bool, where: str) -> list[str]:
        check_unique(body, raw, where)
        warnings = self._check_fields(raw, lenient, where)
        for name in self.harmless_types.keys() & raw.keys():
            try:
                self.harmless_types[name].decode(raw[name])
            except msgspec.ValidationError as error:
                raise _type_error(error, where + name) from None
        for name in self.nested.keys() & raw.keys():
            value = bytes(raw[name])
            schema = self.nested[name]
            if not value.startswith(b"{"):
                continue  # null, or of a wrong type: decoding refuses it
            inner = _raw_object.decode(value)
            path = f"{where}{name}."
            if schema is None:
                check_unique(value, inner, path)
            else:
                warnings += schema._check(value, inner, lenient, path)
        return warnings

    def _check_fields(self, raw: dict[str, msgspec.Raw], lenient: bool, where: str) -> list[str]:
        refused = [name for name in raw.keys() - self._accepted if not self._is_neutral(name, raw[name])]
        if not refused:
            return []
        if lost := self.state.intersection(refused):
            name = min(lost)
            raise RequestError(
                f"'{where}{name}' {self._reason(name)}: send the whole conversation without it",
                param=where + name,
                code="unsupported_parameter",
            )
        shown = heapq.nsmallest(_MAX_REPORTED, refused)
        texts = [f"'{where}{name}' {self._reason(name)}" for name in shown]
        if not lenient:
            more = f"; and {len(refused) - len(shown)} more" if len(refused) > len(shown) else ""
            raise RequestError(
                f"{'; '.join(texts)}{more}. Leave it out, or start the server with --lenient-fields "
                "to have it left out with a warning",
                param=where + shown[0],
                code="unsupported_parameter",
            )
        warnings = [f"{text} and was left out" for text in texts]
        if len(refused) > len(shown):
            warnings.append(f"{len(refused) - len(shown)} more fields were left out")
        return warnings

    def _reason(self, name: str) -> str:
        if name not in self.neutral:
            return "is not a field of this server"
        more = f" ({self.instead[name]})" if name in self.instead else ""
        return f"is not supported with this value{more}"

    def _is_neutral(self, name: str, raw: msgspec.Raw) -> bool:
        value = memoryview(raw)
        if len(value) > _MAX_NEUTRAL_BYTES:
            return False
        if value == _NULL:
            return True
        return name in self.neutral and msgspec.json.decode(value) in self.neutral[name]


class _Typed(msgspec.Struct):
    type: str | None = None


_typed = msgspec.json.Decoder(_Typed)


def type_of(raw: msgspec.Raw, where: str) -> str | None:
    """The `type` of an object, if it has one; `where` is its field. Raises RequestError for other values."""
    try:
        return _typed.decode(raw).type
    except msgspec.ValidationError:
        field = where.rstrip(".")
        raise RequestError(f"'{field}' must be an object whose 'type' is a string", param=field) from None


def kind_of(raw: msgspec.Raw, where: str, kinds: Sequence[str]) -> str:
    """The `type` of an object, one of `kinds`. Raises RequestError for others."""
    kind = type_of(raw, where)
    if kind is None or kind not in kinds:
        field = where.rstrip(".")
        raise RequestError(
            f"'{field}' has type {kind!r:.60}; here this server takes {', '.join(kinds)}",
            param=field,
            code="unsupported_parameter",
        )
    return kind


def check_unique(body: bytes, raw: dict[str, msgspec.Raw], where: str) -> None:
    """Raises RequestError if a name occurs twice in the object `body`, which was decoded as `raw`.

    The decoder keeps the last of two values. The loop steps from name to name over the values in `raw`:
    at a duplicate, either the value in `body` is another one, or the name was seen before.
    """
    if len(raw) > _MAX_NAMES:
        raise RequestError(
            f"'{where.rstrip('.') or 'the body'}' has {len(raw)} fields, at most {_MAX_NAMES} are allowed",
            param=where.rstrip(".") or None,
        )
    for name in raw:
        if len(name) > _MAX_NAME_LENGTH:
            raise RequestError(
                f"the field name '{where}{name[:40]}…' has {len(name)} characters, at most "
                f"{_MAX_NAME_LENGTH} are allowed",
                param=where.rstrip(".") or None,
            )
    if len(body) <= _SMALL and b"\\" not in body and all(body.count(b'"%b"' % n.encode()) == 1 for n in raw):
        return  # without escapes, each name is written in one way
    name = ""
    position = 0
    seen = set[str]()
    while (match := _NAME.match(body, position)) is not None:
        name = _text.decode(match[1])
        position = match.end()
        value = bytes(raw[name])
        if name in seen or not body.startswith(value, position):
            raise _duplicate(where + name)
        seen.add(name)
        position += len(value)
    if _END.match(body, position) is None:  # the last value was only a prefix of a longer number
        raise _duplicate(where + name)


def _duplicate(name: str) -> RequestError:
    return RequestError(f"'{name}' occurs more than once", param=name)


def _type_error(error: msgspec.ValidationError, where: str) -> RequestError:
    """msgspec's "Expected `int`, got `str` - at `$.max_tokens`" with the field as `param`."""
    text, _, path = str(error).rpartition(" - at ")
    if not text:  # the object itself, or a missing field
        text = path
        path = ""
    path = path.removeprefix("`key` in ")
    field = path.strip("`").removeprefix("$").removeprefix(".").replace("[...]", "")
    name = (where + field).rstrip(".")
    if missing := _MISSING.fullmatch(text):
        name = f"{name}.{missing[1]}".lstrip(".")
        return RequestError(f"'{name}' is missing", param=name)
    if not name:
        return RequestError(f"the body must be a JSON object: {text}")
    return RequestError(f"'{name}': {text[0].lower()}{text[1:]}", param=name)
