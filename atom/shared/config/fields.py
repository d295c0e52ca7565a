"""The fields of the configuration classes: the source of flags, checks and documentation.

A field is an annotated line of a frozen dataclass, followed by its docstring. The annotation
defines the accepted values: `Literal` choices, `| None`, and msgspec's `Meta` for ranges.
"""

import ast
import inspect
import json
import math
import operator
import os
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

Scalar = str | int | float | bool


class ConfigError(ValueError):
    """An invalid configuration; the text is one line that says what to change."""


OBJECT = Meta(extra={"holds": "a JSON object"})
"""Marks a text with a JSON object; Python and YAML may pass the object itself."""
NAMES = Meta(extra={"holds": "names"})
"""Marks names separated by commas; a list of them, also as JSON, is accepted."""

_BYTES = {"holds": "bytes"}


def bytes_from(least: int) -> Meta:
    """Marks a size in bytes of at least `least`, which may have a unit: see `size_in_bytes`."""
    return Meta(ge=least, extra=_BYTES)


@dataclass(frozen=True)
class Field:
    """One setting: `kind` is its Python type, `choices` its allowed texts or empty."""

    name: str
    kind: type[Scalar]
    default: Scalar | None
    help: str
    optional: bool
    choices: tuple[str, ...]
    limits: Meta

    @property
    def is_size(self) -> bool:
        """Whether it is a size in bytes."""
        return self.limits.extra == _BYTES

    def parse(self, text: str) -> Any:
        """The value of `text` from a command line or a variable. Raises ConfigError."""
        if self.kind is bool:
            return parse_switch(text)
        if self.is_size:
            return self.check(text)
        try:
            value = self.kind(text)
        except ValueError:
            raise ConfigError(f"{text!r} is not {_KIND_NAMES[self.kind]}") from None
        return self.check(value)

    def check(self, value: Any) -> Any:
        """`value`, checked and converted to the field's type. Raises ConfigError without the field's name."""
        if value is None and self.optional:
            return None
        if self.kind is float and type(value) is int:
            value = float(value)
        if self.kind is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if self.limits == OBJECT:
            return object_text(value)
        if self.limits == NAMES:
            return names_text(value)
        if self.is_size and isinstance(value, str):
            value = size_in_bytes(value)
        if type(value) is not self.kind:
            raise ConfigError(f"{value!r} is not {_KIND_NAMES[self.kind]}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{value!r} is not one of {', '.join(self.choices)}")
        self._check_limits(value)
        return value

    def _check_limits(self, value: Any) -> None:
        if self.kind is float and not math.isfinite(value):
            raise ConfigError(f"{value} is not a finite number")
        for attribute, holds, words in _LIMITS:
            limit = getattr(self.limits, attribute)
            if limit is not None and not holds(value, limit):
                raise ConfigError(f"{value} is out of range: it must be {words} {limit}")
        if self.limits.min_length is not None and len(value) < self.limits.min_length:
            raise ConfigError("it must not be empty")
        if self.name in _FURTHER_RULES:
            fits, words = _FURTHER_RULES[self.name]
            if not fits(value):
                raise ConfigError(f"{value} is invalid: it must be {words}")


_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]?)(i?b?)", re.IGNORECASE | re.ASCII)
_POWERS = " kmgt"


def size_in_bytes(text: str) -> int:
    """The bytes of a size such as 4G, 512M, 1.5GiB, 2GB or 1048576, at most one part of a byte less.

    K, M, G and T count by 1024, as KiB does; KB, MB, GB and TB by 1000. Raises ConfigError.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or ("." in found[1] and not found[2]) or (found[3].lower() == "i" and not found[2]):
        raise ConfigError(f"{text!r:.40} is not a size in bytes, such as 4G, 512M, 1.5GiB or 1048576")
    base = 1000 if found[3].lower() == "b" else 1024
    return int(Decimal(found[1]) * base ** _POWERS.index(found[2].lower() or " "))


def json_object(text: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises ConfigError, also for a duplicate name."""
    try:
        value = json.loads(text, object_pairs_hook=_each_once, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{text!r:.80} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{text!r:.80} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{text!r:.80} is not a JSON object, such as {_OBJECT_EXAMPLE}")
    return value


def object_text(value: Any) -> str:
    """`value`, an object or its JSON text, as JSON text. Raises ConfigError."""
    if not isinstance(value, str | dict):
        raise ConfigError(f"{value!r:.80} is not a JSON object, such as {_OBJECT_EXAMPLE}")
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{value!r:.80} cannot be written as JSON: {error}") from None
    return json.dumps(json_object(text), ensure_ascii=False)


def names_text(value: Any) -> str:
    """`value`, a list of names, also as JSON or separated by commas, in the last form. Raises ConfigError."""
    names = value
    if isinstance(value, str):
        try:
            names = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
        except json.JSONDecodeError as error:
            raise ConfigError(f"{value!r:.80} is not JSON: {error}") from None
        except RecursionError:
            raise ConfigError(f"{value!r:.80} is nested too deeply") from None
    if not names or not isinstance(names, list) or not all(map(_is_name, names)):
        raise ConfigError(f'{value!r:.80} is not a list of names, such as a,b or ["a","b"]')
    return ",".join(name.strip() for name in names)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "," not in value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is given twice")
    return dict(pairs)


def _no_number(text: str) -> NoReturn:
    raise ConfigError(f"{text} is not a JSON number")


_OBJECT_EXAMPLE = '{"max_position_embeddings": 8192}'


def parse_switch(text: str) -> bool:
    """The value of a word for on or off. Raises ConfigError."""
    word = text.strip().lower()
    if word not in _SWITCH_WORDS:
        raise ConfigError(f"{text!r} is not a switch: use 1 or 0 (true, false, yes, no, on, off)")
    return _SWITCH_WORDS[word]


_SWITCH_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}

_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "a switch (True or False)"}

_LIMITS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("ge", operator.ge, "at least"),
    ("gt", operator.gt, "more than"),
    ("le", operator.le, "at most"),
    ("lt", operator.lt, "less than"),
)

# Rules that Meta cannot express: field name -> (predicate, what a value must be).
_FURTHER_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "block_size": (
        lambda size: size & (size - 1) == 0 or size % 16 == 0,
        "a power of two or a multiple of 16",
    ),
    "cudagraph_capture_sizes": (
        lambda text: re.fullmatch(r"\[\s*([1-9]\d{0,5}(\s*,\s*[1-9]\d{0,5})*)?\s*\]", text) is not None,
        "a list of whole numbers from 1, as in [1,2,4,8]",
    ),
}


def fields_of(config_class: Any) -> tuple[Field, ...]:
    """The fields of a configuration class, in order."""
    return _fields_of(config_class)


@cache
def _fields_of(config_class: Any) -> tuple[Field, ...]:
    hints = get_type_hints(config_class, include_extras=True)
    texts = dict(_docstrings(config_class))
    return tuple(
        _describe(field.name, hints[field.name], field.default, texts) for field in fields(config_class)
    )


def _describe(name: str, hint: Any, default: Any, texts: dict[str, str]) -> Field:
    hint, optional = _without_none(hint)
    limits = Meta()
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
    choices: tuple[str, ...] = ()
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        hint = str
    if name not in texts:
        raise TypeError(f"configuration field {name} has no docstring")
    return Field(name, hint, default, texts[name], optional, choices, limits)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        (kept,) = (part for part in get_args(hint) if part is not types.NoneType)
        return kept, True
    return hint, False


def _docstrings(config_class: type[Any]) -> Iterator[tuple[str, str]]:
    """Name and docstring of each field, parsed from the source: Python does not keep them."""
    (declaration,) = ast.parse(dedent(inspect.getsource(config_class))).body
    assert isinstance(declaration, ast.ClassDef)
    body = declaration.body
    for statement, following in pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            yield statement.target.id, inspect.cleandoc(str(following.value.value))
