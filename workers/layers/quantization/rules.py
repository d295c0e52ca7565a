"""Rules of a quantization method: which scheme a matrix has, by the path of its module.

The file of a method, named in `config.METHODS`, exports one function:

    def rules(stated: Mapping[str, Any]) -> Rules

`stated` is the checkpoint's quantization_config. It returns the scheme of all layers that no rule
names, and the rules in their order of precedence, each with the method's own way of matching. It
raises ValueError for what cannot run; the message follows "quantized (METHOD) with ".
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from workers.layers.quantization.scheme import PLAIN, Scheme

REGEX = "re:"
Match = Callable[[str, str], bool]
"""Whether a pattern names the module with a path, as model.layers.0.mlp.down_proj."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The scheme of modules that `pattern` names."""

    pattern: str
    scheme: Scheme
    match: Match

    def names(self, module: str) -> bool:
        return self.match(self.pattern, module)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a quantization_config says."""

    default: Scheme
    rules: tuple[Rule, ...] = ()
    """The first that names a module decides."""

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return (self.default, *(rule.scheme for rule in self.rules))


def exact(pattern: str, module: str) -> bool:
    """The path itself."""
    return pattern == module


def part(pattern: str, module: str) -> bool:
    """Whole names of the path: mlp.gate names model.layers.0.mlp.gate and the modules inside."""
    return f".{pattern}." in f".{module}."


def substring(pattern: str, module: str) -> bool:
    return pattern in module


def regex(pattern: str, module: str) -> bool:
    """A regular expression that matches from the start; a prefix re: is not part of it."""
    return re.match(pattern.removeprefix(REGEX), module) is not None


def glob(pattern: str, module: str) -> bool:
    """A glob of the whole path, or of the path of a module around it."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def as_written(pattern: str, module: str, otherwise: Match = part) -> bool:
    """By the pattern's form: a regular expression after re:, a glob if it has * ? or [."""
    if pattern.startswith(REGEX):
        return regex(pattern, module)
    if any(character in pattern for character in "*?["):
        return glob(pattern, module)
    return otherwise(pattern, module)


def always(pattern: str, module: str) -> bool:
    return True


def excluded(stated: Mapping[str, Any], keys: Iterable[str], match: Match) -> tuple[Rule, ...]:
    """Rules for the modules that the lists under `keys` leave plain. Raises ValueError for other values."""
    return tuple(Rule(pattern, PLAIN, match) for key in keys for pattern in patterns(stated, key))


def patterns(stated: Mapping[str, Any], key: str) -> list[str]:
    """The patterns listed under `key`; none if it is missing or null. Raises ValueError for other values."""
    found = stated.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(pattern, str) and pattern for pattern in found):
        raise ValueError(f"{key} that is not a list of module names: {found!r:.80}")
    for pattern in found:
        if pattern.startswith(REGEX):
            check_regex(pattern.removeprefix(REGEX))
    return found


def check_regex(expression: str) -> None:
    """Raise ValueError for text that is not a regular expression."""
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"{expression!r:.80}, not a regular expression for modules: {error}") from None


def section(stated: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`, empty if it is missing or null. Raises ValueError for other values."""
    found = stated.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{key} that is not an object: {found!r:.80}")
    return found


def one_of(stated: Mapping[str, Any], key: str, values: Iterable[Any], default: Any) -> Any:
    """The value of `key`; null is the default. Raises ValueError for one that is not in `values`."""
    found, allowed = stated.get(key), tuple(values)
    if found is None:
        return default
    # A list or 1 for true would be equal or unhashable: compare type and value.
    if not any(type(found) is type(value) and found == value for value in allowed):
        raise ValueError(f"{key} {found!r:.80}; supported: {', '.join(map(str, allowed))}")
    return found
