"""Regular expressions as xgrammar honours them.

It ignores lookarounds and anchors within an expression, takes `\\A` for the letter, and lets `.` match a line
break. So it gets character sets, groups, alternatives and repetitions alone, which match the whole text: what
may stand before and after replaces the anchors.
"""

from collections.abc import Iterable
from functools import lru_cache

from workers.grammar.automata import restricted
from workers.grammar.expressions import (
    ANYTHING,
    Anchor,
    Chars,
    Choice,
    Join,
    Look,
    Node,
    PatternError,
    Ranges,
    Repeat,
    complement,
    intersection,
    parsed,
    union,
)

__all__ = ["PLAIN", "PatternError", "all_but", "found_anywhere", "full_match", "spelled"]

PLAIN: Ranges = intersection(ANYTHING, ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)))
"""All that may stand in a JSON string without an escape sequence."""

_MAX_CACHED = 1024  # expressions have few different sets
_LONGEST_REPETITION = 128
"""Characters of a repetition that is left to xgrammar, which then makes a state of each."""
_BLOCK = 32
"""Characters of the blocks of a long repetition. Twice as many double its compiled size, and half as many the
time that a mask takes."""
_EMPTY = Join(())
_REST = Repeat(Chars(ANYTHING), 0, None)


def full_match(text: str) -> str:
    """For xgrammar, an expression in Python's syntax that a whole text matches. Raises PatternError."""
    spelling = spelled(_anchored(parsed(text, is_python=True), _EMPTY), ANYTHING)
    if spelling is None:
        raise PatternError(f"no text matches {text!r:.80}")
    return spelling


def found_anywhere(text: str) -> Node:
    """What a string is in which the `pattern` of a JSON schema is found. Raises PatternError."""
    return _anchored(parsed(text, is_python=False), _REST)


def all_but(texts: Iterable[str]) -> Node:
    """Every text that is none of these."""
    tails: dict[str, list[str]] = {}
    is_one = False
    for text in texts:
        if text:
            tails.setdefault(text[0], []).append(text[1:])
        is_one = is_one or not text
    others = Join((Chars(_others("".join(sorted(tails)))), _REST))
    longer = [Join((Chars(((ord(head), ord(head)),)), all_but(rest))) for head, rest in tails.items()]
    return Choice((*(() if is_one else (_EMPTY,)), others, *longer))


@lru_cache(_MAX_CACHED)
def _others(characters: str) -> Ranges:
    return complement(union([(ord(character), ord(character)) for character in characters]))


def spelled(node: Node, allowed: Ranges) -> str | None:
    """For xgrammar and `re.fullmatch`, with characters in `allowed` alone; None: no text matches."""
    match node:
        case Chars(ranges):
            return _spelled_set(ranges, allowed)
        case Join(parts):
            spellings = [spelled(part, allowed) for part in parts]
            return None if None in spellings else "".join(map(str, spellings))
        case Choice(options):
            found = [text for option in options if (text := spelled(option, allowed)) is not None]
            return f"(?:{'|'.join(dict.fromkeys(found))})" if found else None
        case Repeat(part, low, high):
            text = None if high == 0 else spelled(part, allowed)
            if not text:
                return "" if text == "" or low == 0 or high == 0 else None
            if isinstance(part, Chars) and max(low, high or 0) > _LONGEST_REPETITION:
                return _spelled_run(text, low, high)
            return f"(?:{text}){_spelled_bounds(low, high)}"
    raise AssertionError(f"{node} is resolved before")


def _spelled_bounds(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return f"{{{low},{high}}}"


def _spelled_run(chars: str, low: int, high: int | None) -> str:
    """Many characters of a set, in blocks.

    Within a longer repetition xgrammar 0.2.8 may allow tokens of which only the first character
    fits, and tries the whole vocabulary again for each mask, which takes 14 ms with 49,000 tokens. Within
    blocks it tries it near their ends alone.
    """
    block = f"(?:{chars}{{{_BLOCK}}})"
    count, rest = divmod(low, _BLOCK)
    least = (f"{block}{{{count}}}" if count else "") + (f"{chars}{{{rest}}}" if rest else "")
    if high is None:
        return f"{least}{chars}*"
    count = max(0, (high - low + 1) // _BLOCK - 1)
    rest = high - low - count * _BLOCK
    return least + (f"{block}{{0,{count}}}" if count else "") + (f"{chars}{{0,{rest}}}" if rest else "")


@lru_cache(_MAX_CACHED)
def _spelled_set(ranges: Ranges, allowed: Ranges) -> str | None:
    kept = intersection(ranges, allowed)
    texts = (_spelled_end(a) if a == b else f"{_spelled_end(a)}-{_spelled_end(b)}" for a, b in kept)
    return f"[{''.join(texts)}]" if kept else None


def _spelled_end(code: int) -> str:
    character = chr(code)
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"\\x{code:02x}"
    return f"\\{character}" if character in "\\]^-[" else character


def _anchored(node: Node, rest: Node) -> Node:
    """`node` with `rest` before and after it, where no anchor is. Raises PatternError for other anchors."""
    resolved = _without_looks(_extended(_extended(node, rest, False), rest, True))
    _check_resolved(resolved)
    return resolved


def _without_looks(node: Node) -> Node:
    """`node`, which matches the rest of a text, without the lookaheads that stand in no inner group."""
    if isinstance(node, Choice):
        return Choice(tuple(map(_without_looks, node.options)))
    parts = node.parts if isinstance(node, Join) else (node,)
    index = next((index for index, part in enumerate(parts) if isinstance(part, Look)), None)
    if index is None:
        is_inner = len(parts) == 0 or not isinstance(parts[-1], Choice)
        return node if is_inner else Join((*parts[:-1], _without_looks(parts[-1])))
    look = parts[index]
    assert isinstance(look, Look)
    ahead = _extended(look.part, _REST, True)
    following = _without_looks(Join(parts[index + 1 :]))
    for each in (ahead, following):
        _check_resolved(each)
    try:
        made = restricted(following, ahead, look.is_negative)
    except PatternError as error:
        raise _refused(look, f"here: {error}") from None
    return Join((*parts[:index], made))


def _refused(look: Look, why: str) -> PatternError:
    sign = "(?!" if look.is_negative else "(?="
    return PatternError(f"a lookahead '{sign}' cannot be enforced {why} (position {look.position})")


def _extended(node: Node, rest: Node, at_end: bool) -> Node:
    """`node` with `rest` on one side, but where an anchor of this side stands."""
    if isinstance(node, Anchor) and node.is_end == at_end:
        return _EMPTY
    if isinstance(node, Choice):
        return Choice(tuple(_extended(option, rest, at_end) for option in node.options))
    if isinstance(node, Repeat) and (node.low, node.high) == (0, 1) and _has_anchor(node, at_end):
        return Choice((rest, _extended(node.part, rest, at_end)))
    if isinstance(node, Join) and node.parts:
        return _extended_join(node.parts, rest, at_end)
    return _joined((rest, node), at_end)


def _extended_join(parts: tuple[Node, ...], rest: Node, at_end: bool) -> Node:
    outer, inner = (parts[-1], parts[:-1]) if at_end else (parts[0], parts[1:])
    if isinstance(outer, Anchor) and outer.is_end == at_end:
        return _extended(Join(inner), _EMPTY, at_end)
    if _has_anchor(outer, at_end):
        return _joined((_extended(outer, rest, at_end), Join(inner)), at_end)
    return _joined((rest, *(reversed(parts) if at_end else parts)), at_end)


def _joined(parts: Iterable[Node], at_end: bool) -> Node:
    """The parts, of which the first is the outermost on this side."""
    flat: list[Node] = []
    for part in reversed([*parts]) if at_end else parts:
        flat += part.parts if isinstance(part, Join) else (part,)
    return Join(tuple(flat))


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Join(parts) | Choice(parts):
            return parts
        case Repeat(part):
            return (part,)
    return ()


def _has_anchor(node: Node, at_end: bool) -> bool:
    if isinstance(node, Anchor):
        return node.is_end == at_end
    return any(_has_anchor(child, at_end) for child in _children(node))


def _check_resolved(node: Node) -> None:
    """Raises PatternError for what is not resolved."""
    if isinstance(node, Look):
        raise _refused(node, "inside of a group or lookahead")
    if isinstance(node, Anchor):
        where = "after the end" if node.is_end else "before the beginning"
        raise PatternError(
            f"'{node.sign}' with something {where} cannot be enforced (position {node.position})"
        )
    for child in _children(node):
        _check_resolved(child)
