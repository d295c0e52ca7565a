"""Regular expressions as trees: the syntax of ECMAScript (JSON schemas) or of Python.

`\\d`, `\\w` and `\\s` mean what they mean in ECMAScript, or in Python with re.ASCII. What cannot be enforced
is refused by name: lookbehinds, backreferences, word boundaries, flags, Unicode properties.
"""

import re
from dataclasses import dataclass

__all__ = [
    "ANYTHING",
    "Anchor",
    "Chars",
    "Choice",
    "Join",
    "Look",
    "Node",
    "PatternError",
    "Ranges",
    "Repeat",
    "complement",
    "intersection",
    "parsed",
    "union",
]

Ranges = tuple[tuple[int, int], ...]
"""Code points as sorted ranges that do not touch, both ends inclusive."""

_MAX_REPEAT = 1 << 20
_SURROGATES = (0xD800, 0xDFFF)
_END = ""


class PatternError(ValueError):
    """An expression that is wrong, or has a construct that cannot be enforced; the text is for the client."""


@dataclass(frozen=True)
class Chars:
    """One character of a set, which may be empty."""

    ranges: Ranges


@dataclass(frozen=True)
class Join:
    """All parts, one after another; none: the empty text."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    """One of several."""

    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """`part`, from `low` to `high` times; None: without a limit."""

    part: "Node"
    low: int
    high: int | None


@dataclass(frozen=True)
class Anchor:
    """The beginning of the text, or its end."""

    is_end: bool
    sign: str
    position: int


@dataclass(frozen=True)
class Look:
    """A lookahead: what follows begins with `part`, or does not."""

    part: "Node"
    is_negative: bool
    position: int


Node = Chars | Join | Choice | Repeat | Anchor | Look


def union(ranges: list[tuple[int, int]]) -> Ranges:
    """The set of all code points in `ranges`."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All other characters; surrogates are none."""
    found = []
    start = 0
    for low, high in union([*ranges, _SURROGATES]):
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    if start <= 0x10FFFF:
        found.append((start, 0x10FFFF))
    return tuple(found)


def intersection(first: Ranges, second: Ranges) -> Ranges:
    """The code points that are in both sets."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return union([(low, high) for low, high in pairs if low <= high])


def _set(text: str) -> Ranges:
    return union([(ord(character), ord(character)) for character in text])


ANYTHING = complement(())
_DIGITS: Ranges = ((ord("0"), ord("9")),)
_WORD = union([*_DIGITS, (ord("A"), ord("Z")), (ord("a"), ord("z")), (ord("_"), ord("_"))])
_ASCII_SPACE = _set("\t\n\v\f\r ")
_SPACE = union([*_ASCII_SPACE, *_set("\u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), (0x2000, 0x200A)])
_LINE_ENDS = _set("\n\r\u2028\u2029")

_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_HEX = {"x": 2, "u": 4, "U": 8}
_GROUPS = re.compile(r"\(\?(?:(?P<plain>:|P?<(?!=|!)[^>]*>)|(?P<ahead>[=!])|(?P<other>.{0,2}))", re.DOTALL)
_REPEATS = re.compile(r"\{(\d*)(,?)(\d*)\}")
_UNKNOWN = {
    "<=": "a lookbehind '(?<='",
    "<!": "a lookbehind '(?<!'",
    "P=": "a backreference '(?P='",
    ">": "an atomic group '(?>'",
    "#": "a comment '(?#'",
    "(": "a condition '(?('",
}
_ESCAPES = {
    "b": "the word boundary '\\b'",
    "B": "the word boundary '\\B'",
    "p": "the Unicode property '\\p'",
    "P": "the Unicode property '\\P'",
    "k": "a backreference '\\k'",
}


def parsed(text: str, is_python: bool) -> Node:
    """The tree of an expression. Raises PatternError."""
    return _Parser(text, is_python).whole()


class _Parser:
    def __init__(self, text: str, is_python: bool):
        self._text = text
        self._at = 0
        self._is_python = is_python
        space = _ASCII_SPACE if is_python else _SPACE
        self._classes = {"d": _DIGITS, "w": _WORD, "s": space}
        self._classes |= {name.upper(): complement(ranges) for name, ranges in self._classes.items()}
        self._dot = complement(_set("\n") if is_python else _LINE_ENDS)

    def whole(self) -> Node:
        node = self._choice()
        if self._next() == ")":
            raise self._wrong("a parenthesis ')' closes no group")
        return node

    def _next(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else _END

    def _take(self) -> str:
        character = self._next()
        self._at += 1
        return character

    def _wrong(self, what: str, at: int | None = None) -> PatternError:
        return PatternError(f"{what} (position {self._at if at is None else at} of {self._text!r:.80})")

    def _refused(self, what: str, at: int) -> PatternError:
        return self._wrong(f"{what} cannot be enforced", at)

    def _choice(self) -> Node:
        options = [self._join()]
        while self._next() == "|":
            self._at += 1
            options.append(self._join())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _join(self) -> Node:
        parts = []
        while self._next() not in (_END, "|", ")"):
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Join(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        at = self._at
        bounds = self._bounds()
        if bounds is None:
            return node
        low, high = bounds
        if isinstance(node, (Anchor, Look)):
            raise self._wrong("an assertion cannot be repeated", at)
        if max(low, high or 0) > _MAX_REPEAT or (high is not None and high < low):
            raise self._wrong("the repetition's bounds are wrong or too large", at)
        if self._next() == "+":
            raise self._refused("a possessive repetition", self._at)
        if self._next() == "?":  # lazy: the same texts
            self._at += 1
        at = self._at
        if self._bounds() is not None:
            raise self._wrong("a repetition has nothing to repeat", at)
        return Repeat(node, low, high)

    def _bounds(self) -> tuple[int, int | None] | None:
        """Takes the repetition that stands here; None if there is none."""
        character = self._next()
        if character in ("*", "+", "?") and character:
            self._at += 1
            return (1 if character == "+" else 0), (1 if character == "?" else None)
        match = _REPEATS.match(self._text, self._at)
        if match is None or not (match[1] or (match[3] and match[2])):
            return None
        if not match[1] and not self._is_python:
            raise self._wrong("a repetition needs a lower bound: write {0,…}")
        self._at = match.end()
        if max(len(match[1]), len(match[3])) > 8:
            raise self._wrong("the repetition's bounds are wrong or too large")
        low = int(match[1] or 0)
        return low, (int(match[3]) if match[3] else None) if match[2] else low

    def _atom(self) -> Node:
        at = self._at
        character = self._take()
        match character:
            case "(":
                return self._group(at)
            case "[":
                return Chars(self._class(at))
            case ".":
                return Chars(self._dot)
            case "^" | "$":
                return Anchor(character == "$", character, at)
            case "*" | "+" | "?":
                raise self._wrong("a repetition has nothing to repeat", at)
            case "\\":
                return self._escaped(at)
        if _SURROGATES[0] <= ord(character) <= _SURROGATES[1]:
            raise self._wrong("a surrogate is no character", at)
        return Chars(_set(character))

    def _group(self, at: int) -> Node:
        look = ""
        if self._next() == "?":
            match = _GROUPS.match(self._text, at)
            assert match is not None, "the last alternative matches anything"
            if (other := match["other"]) is not None:
                name = _UNKNOWN.get(other) or _UNKNOWN.get(other[:1]) or "a group with flags '(?'"
                raise self._refused(name, at)
            look = match["ahead"] or ""
            self._at = match.end()
        node = self._choice()
        if self._take() != ")":
            raise self._wrong("a parenthesis '(' is not closed", at)
        return Look(node, look == "!", at) if look else node

    def _escaped(self, at: int) -> Node:
        character = self._next()
        if character in ("A", "Z"):
            self._at += 1
            return Anchor(character == "Z", f"\\{character}", at)
        if character in ("b", "B"):
            raise self._refused(_ESCAPES[character], at)
        return Chars(self._escape(at))

    def _escape(self, at: int) -> Ranges:
        """The set that the escape sequence at `at` means; `\\` is taken already."""
        character = self._take()
        if character in self._classes:
            return self._classes[character]
        if character in _CONTROLS:
            return _set(_CONTROLS[character])
        if character in _HEX and (character != "U" or self._is_python):
            code = self._code(at, character)
            return ((code, code),)
        if character == "0" and not self._next().isdigit():
            return _set("\0")
        if character.isdigit():
            raise self._refused(f"a backreference '\\{character}'", at)
        if character == "c" and not self._is_python and re.match("[A-Za-z]", self._next()):
            return _set(chr(ord(self._take()) % 32))
        if character == _END or character.isalpha():
            name = _ESCAPES.get(character, f"the escape sequence '\\{character}'")
            raise self._refused(name, at)
        return _set(character)

    def _code(self, at: int, kind: str) -> int:
        """The code point of `\\x`, `\\u` or `\\U`, of which the digits stand here."""
        braces = (
            None if self._is_python else re.compile(r"\{([0-9A-Fa-f]{1,8})\}").match(self._text, self._at)
        )
        match = braces if kind == "u" and braces is not None else self._digits(_HEX[kind], self._at)
        if match is None:
            raise self._wrong(f"the escape sequence '\\{kind}' lacks its {_HEX[kind]} digits", at)
        self._at = match.end()
        code = int(match[1], 16)
        if 0xD800 <= code < 0xDC00 and self._text[self._at : self._at + 2] == "\\u":
            low = self._digits(4, self._at + 2)
            if low is not None and 0xDC00 <= int(low[1], 16) < 0xE000:
                self._at = low.end()
                return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return code

    def _digits(self, count: int, at: int) -> re.Match[str] | None:
        return re.compile(f"([0-9A-Fa-f]{{{count}}})").match(self._text, at)

    def _class(self, at: int) -> Ranges:
        """The set of `[…]`, of which the `[` is taken already."""
        is_negated = self._next() == "^"
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        is_first = self._is_python  # in ECMAScript [] is the empty set
        while (character := self._next()) != "]" or is_first:
            is_first = False
            if character == _END:
                raise self._wrong("a bracket '[' is not closed", at)
            begin = self._class_part()
            following = self._text[self._at : self._at + 2]
            if following[:1] != "-" or following[1:] in ("]", _END):
                ranges += begin
                continue
            self._at += 1
            ranges.append(self._range(begin, self._class_part()))
        self._at += 1
        found = intersection(union(ranges), ANYTHING)
        return complement(found) if is_negated else found

    def _class_part(self) -> Ranges:
        at = self._at
        character = self._take()
        if character != "\\":
            return _set(character)
        if self._next() == "b":
            self._at += 1
            return _set("\b")
        return self._escape(at)

    def _range(self, begin: Ranges, end: Ranges) -> tuple[int, int]:
        low = begin[0][0]
        high = end[-1][1]
        if begin != ((low, low),) or end != ((high, high),) or high < low:
            raise self._wrong("a range of characters has a wrong end")
        return low, high
