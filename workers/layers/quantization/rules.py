"""Rules of a quantization method: which scheme a matrix has, by the path of its module.

The file of a method, named in `config.METHODS`, exports one function:

    def rules(stated: Mapping[str, Any]) -> Rules

`stated` is the checkpoint's quantization_config. It returns the scheme of all layers that no rule
names, and the rules in their order of precedence, each with the method's own way of matching. It
raises ValueError for what cannot run; the message follows "quantized (METHOD) with ".
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Any

from workers.layers.quantization.scheme import PLAIN, Scheme

REGEX = "re:"
_WILDCARDS = "*?["
_NUMBER = re.compile(r"\d+")
_LITERAL = re.compile(r"(?:(?:\w|\\\.)(?![*+?{]))*")
"""The start of a regular expression: letters, digits and escaped dots without a quantifier."""
_BLIND = re.compile(r"(?:\.\*|\\\.|[A-Za-z_()|$^])*")
"""A regular expression that cannot tell one number from another."""
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


class Rules:
    """What a quantization_config says: the first rule that names a module decides, else the default.

    Literal patterns are looked up and not tried, since a checkpoint may list every expert of every layer.
    """

    def __init__(self, default: Scheme, rules: Iterable[Rule] = (), with_vocabulary: bool = False):
        """`with_vocabulary`: the embedding and the LM head follow them too, instead of being plain."""
        self.default = default
        self.with_vocabulary = with_vocabulary
        self.rules = tuple(rules)
        self._exact: dict[str, int] = {}
        self._parts: dict[str, int] = {}
        self._around: dict[str, int] = {}
        self._substrings: dict[str, int] = {}
        self._others: list[tuple[int, Rule]] = []
        tables: dict[Match, dict[str, int]] = {
            exact: self._exact, part: self._parts, inside: self._around, substring: self._substrings,
        }  # fmt: skip
        for number, rule in enumerate(self.rules):
            match = by_form(rule.pattern, part) if rule.match is as_written else rule.match
            if match is glob and not _has_wildcards(rule.pattern):
                match = inside
            if (literal := tables.get(match)) is not None:
                literal.setdefault(rule.pattern, number)
            else:
                self._others.append((number, rule))
        self._lengths = {len(pattern) for pattern in self._substrings}

    def scheme(self, *paths: str) -> Scheme:
        """That of the first rule that names the module, by any of its paths."""
        rule = self.deciding(*paths)
        return self.default if rule is None else rule.scheme

    def _literal(self, path: str) -> Iterator[int]:
        """Numbers of the rules whose pattern is the path or a part of it, each as its kind is matched."""
        if path in self._exact:
            yield self._exact[path]
        if self._around:
            dots = [place for place, character in enumerate(path) if character == "."]
            yield from _found(self._around, (path[:end] for end in (*dots, len(path))))
        for length in self._lengths:
            starts = range(len(path) - length + 1)
            yield from _found(self._substrings, (path[start : start + length] for start in starts))
        names = path.split(".") if self._parts else []
        for first in range(len(names)):
            ends = range(first + 1, len(names) + 1)
            yield from _found(self._parts, (".".join(names[first:end]) for end in ends))

    def deciding(self, *paths: str) -> Rule | None:
        """The first rule that names the module, by any of its paths; None if the default applies."""
        literal = min((number for path in paths for number in self._literal(path)), default=len(self.rules))
        for number, rule in self._others:
            if number > literal:
                break
            if any(rule.names(path) for path in paths):
                return rule
        return None if literal == len(self.rules) else self.rules[literal]

    @cached_property
    def siblings(self) -> "Siblings":
        return Siblings(self.rules)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return (self.default, *(rule.scheme for rule in self.rules))


class Siblings:
    """Which modules have children, with numbers as names, of which rules may name some and not others."""

    def __init__(self, rules: Iterable[Rule]):
        self._before_numbers: set[str] = set()
        self._starts: set[str] = set()
        for rule in rules:
            if rule.match is regex or rule.pattern.startswith(REGEX):
                expression = rule.pattern.removeprefix(REGEX)
                if not _BLIND.fullmatch(expression):
                    self._starts.add(_literal_start(expression))
            elif "?" in rule.pattern or "[" in rule.pattern:
                self._starts.add("")
            else:
                numbers = _NUMBER.finditer(rule.pattern)
                before = (rule.pattern[: number.start()] for number in numbers)
                self._before_numbers.update(text.rpartition("*")[2] for text in before)

    def differ(self, path: str) -> bool:
        """Whether the children of the module at `path` may have different schemes."""
        parent = f"{path}."
        if any(parent[start:] in self._before_numbers for start in range(len(parent) + 1)):
            return True
        return any(parent.startswith(start) or start.startswith(parent) for start in self._starts)


def _literal_start(expression: str) -> str:
    """Characters with which every text begins that the regular expression matches."""
    if "|" in expression or "(?" in expression:
        return ""
    found = _LITERAL.match(expression)
    assert found is not None, "it may be empty"
    return found[0].replace("\\", "")


def _found(numbers: Mapping[str, int], texts: Iterable[str]) -> Iterator[int]:
    return (numbers[text] for text in texts if text in numbers)


def exact(pattern: str, module: str) -> bool:
    """Whether the pattern is the path itself."""
    return pattern == module


def part(pattern: str, module: str) -> bool:
    """Whole names of the path: mlp.gate names model.layers.0.mlp.gate and the modules inside."""
    return f".{pattern}." in f".{module}."


def inside(pattern: str, module: str) -> bool:
    """The path itself, or that of a module around it."""
    return module == pattern or module.startswith(f"{pattern}.")


def substring(pattern: str, module: str) -> bool:
    return pattern in module


def regex(pattern: str, module: str) -> bool:
    """A regular expression that matches from the start; a prefix re: is not part of it."""
    return _compiled(pattern.removeprefix(REGEX)).match(module) is not None


@cache  # that of `re` has 512 places, and checkpoints may list an expression for each module
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(expression)


def glob(pattern: str, module: str) -> bool:
    """A glob of the whole path, or of the path of a module around it."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def as_written(pattern: str, module: str) -> bool:
    """By the pattern's form: see `by_form`; otherwise as `part`."""
    return by_form(pattern, part)(pattern, module)


def by_form(pattern: str, literal: Match) -> Match:
    """How a pattern is matched: a regular expression after re:, a glob if it has * ? or [, else `literal`."""
    if pattern.startswith(REGEX):
        return regex
    return glob if _has_wildcards(pattern) else literal


def _has_wildcards(pattern: str) -> bool:
    return any(character in pattern for character in _WILDCARDS)


def always(pattern: str, module: str) -> bool:
    return True


def excluded(
    stated: Mapping[str, Any], keys: Iterable[str], match: Match, forms: bool = False
) -> tuple[Rule, ...]:
    """Rules for the modules that the lists under `keys` leave plain. Raises ValueError for other values.

    `forms`: patterns may also be regular expressions or globs, see `by_form`.
    """
    listed = [pattern for key in keys for pattern in patterns(stated, key)]
    return tuple(Rule(pattern, PLAIN, by_form(pattern, match) if forms else match) for pattern in listed)


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
        _compiled(expression)
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
    found = stated.get(key)
    allowed = tuple(values)
    if found is None:
        return default
    # A list or 1 for true would be equal or unhashable: compare type and value.
    if not any(type(found) is type(value) and found == value for value in allowed):
        raise ValueError(f"{key} {found!r:.80}; supported: {', '.join(map(str, allowed))}")
    return found
