"""Decoding of JSON objects with a rule for every field.

Fields of the Struct are supported. Harmless fields cannot change the output and are accepted. All
other fields are refused unless their value is null or neutral. No field is dropped silently: with
--lenient-fields, dropped fields are listed in the response's `warnings`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from frontend.errors import RequestError

__all__ = ["Schema"]

T = TypeVar("T", bound=msgspec.Struct)

_raw_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class Schema(Generic[T]):
    """The fields of one kind of JSON object."""

    struct: type[T]
    neutral: Mapping[str, tuple[Any, ...]]
    """Known unsupported fields, with their accepted values beside null."""
    harmless: frozenset[str]

    def decode(self, body: bytes, lenient: bool, where: str = "") -> tuple[T, list[str]]:
        """(the object, warnings). Raises RequestError naming the field at fault.

        `where` is the path of the object in the request, a prefix of field names in errors.
        """
        try:
            raw = _raw_object.decode(body)
            self._refuse_duplicates(body, raw, where)
            warnings = self._check_fields(raw, lenient, where)
            return msgspec.json.decode(body, type=self.struct), warnings
        except msgspec.ValidationError as error:
            raise _type_error(error, where) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None

    @cached_property
    def _accepted(self) -> frozenset[str]:
        """Fields accepted with any value of the right type."""
        return self.harmless.union(self.struct.__struct_fields__)

    @cached_property
    def _known(self) -> frozenset[str]:
        return self._accepted.union(self.neutral)

    def _check_fields(self, raw: dict[str, msgspec.Raw], lenient: bool, where: str) -> list[str]:
        objections = []
        for name in raw.keys() - self._accepted:
            if name not in self.neutral:
                objections.append((where + name, "is not a field that this server knows"))
            elif not self._is_neutral(name, raw[name]):
                objections.append((where + name, "is not supported with this value"))
        objections.sort()
        texts = [f"'{name}' {problem}" for name, problem in objections]
        if texts and not lenient:
            raise RequestError(
                f"{'; '.join(texts)}. Leave it out, or start the server with --lenient-fields "
                "to have it left out with a warning",
                param=objections[0][0],
                code="unsupported_parameter",
            )
        return [f"{text} and was left out" for text in texts]

    def _refuse_duplicates(self, body: bytes, raw: dict[str, msgspec.Raw], where: str) -> None:
        """A field that comes twice has no meaning that every reader would agree on.

        The exact look costs a second parser, so only bodies that may hold one get it.
        """
        suspects = {name for name in raw if name in self._known and body.count(b'"%b"' % name.encode()) > 1}
        if not suspects:
            return
        seen: set[str] = set()
        for name in _names(body):
            if name in suspects and name in seen:
                raise RequestError(f"'{where}{name}' is there more than once", param=where + name)
            seen.add(name)

    def _is_neutral(self, name: str, raw: msgspec.Raw) -> bool:
        value = msgspec.json.decode(raw)
        return value is None or value in self.neutral[name]


def _names(body: bytes) -> list[str]:
    """The names in an object, as often as they are there."""
    try:
        # The hook sees inner objects first, the whole one last; integers stay text.
        pairs: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list, parse_int=str)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    return [name for name, _ in pairs]


def _type_error(error: msgspec.ValidationError, where: str) -> RequestError:
    """msgspec's "Expected `int`, got `str` - at `$.max_tokens`" with the field as `param`."""
    text, _, path = str(error).rpartition(" - at ")
    if not text:  # the object itself, or a field that it lacks
        text, path = path, ""
    field = path.strip("`").removeprefix("$").removeprefix(".").replace("[...]", "")
    name = (where + field).rstrip(".")
    if not name:
        return RequestError(f"the body must be a JSON object: {text}")
    return RequestError(f"'{name}': {text[0].lower()}{text[1:]}", param=name)
