"""What a regular expression matches, restricted to what another one matches, or to what it does not.

Both become deterministic automata over classes of characters that neither tells apart. Their product becomes
an expression again, by eliminating one state after another. All sizes are bounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from workers.grammar.expressions import (
    ANYTHING,
    Chars,
    Choice,
    Join,
    Node,
    PatternError,
    Ranges,
    Repeat,
    union,
)

__all__ = ["restricted"]

_MAX_STATES = 2000  # of an automaton that is not deterministic
_MAX_SUBSETS = 200  # of a deterministic one, and of a product
_MAX_LENGTH = 4000  # of the expression that comes out, in sets of characters
_MAX_CLASSES = 256
_EMPTY = Join(())
_Key = TypeVar("_Key")


def restricted(node: Node, other: Node, is_excluded: bool) -> Node:
    """What matches `node`, and also `other`, or not `other`. Raises PatternError for what is too large.

    Neither has anchors or lookaheads. Nothing may match: then it is a Choice of no options.
    """
    classes = _classes([*_sets(node), *_sets(other)])
    first = _deterministic(node, classes)
    second = _deterministic(other, classes)
    return _expression(_product(first, second, is_excluded), classes)


def _sets(node: Node) -> Iterator[Ranges]:
    match node:
        case Chars(ranges):
            yield ranges
        case Join(parts) | Choice(parts):
            for part in parts:
                yield from _sets(part)
        case Repeat(part):
            yield from _sets(part)


def _classes(sets: list[Ranges]) -> list[Ranges]:
    """Disjoint sets, of which each given one is a union, as is the set of all characters."""
    bounds = sorted({end for ranges in [*sets, ANYTHING] for low, high in ranges for end in (low, high + 1)})
    members: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    distinct = list(dict.fromkeys(sets))
    if len(bounds) * len(distinct) > 1 << 20:
        raise _too_large()
    for low, after in pairwise(bounds):
        signature = tuple(_has(ranges, low) for ranges in distinct)
        if _has(ANYTHING, low):
            members.setdefault(signature, []).append((low, after - 1))
    if len(members) > _MAX_CLASSES:
        raise _too_large()
    return [union(ranges) for ranges in members.values()]


def _has(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _too_large() -> PatternError:
    return PatternError("the expression is too large to be combined with another one")


@dataclass
class _Nondeterministic:
    """States with moves by a set of characters, and moves without one."""

    moves: list[list[tuple[Ranges, int]]] = field(default_factory=list)
    free: list[list[int]] = field(default_factory=list)

    def state(self) -> int:
        if len(self.moves) >= _MAX_STATES:
            raise _too_large()
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def add(self, node: Node, start: int) -> int:
        """Add the states of `node`, from `start` on; returns its last state."""
        match node:
            case Chars(ranges):
                end = self.state()
                self.moves[start].append((ranges, end))
                return end
            case Join(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Choice(options):
                end = self.state()
                for option in options:
                    self.free[self.add(option, start)].append(end)
                return end
            case Repeat(part, low, high):
                return self._add_repeated(part, low, high, start)
        raise AssertionError(f"{node} is resolved before")

    def _add_repeated(self, part: Node, low: int, high: int | None, start: int) -> int:
        for _ in range(low):
            start = self.add(part, self._after(start))
        if high is None:
            start = self._after(start)
            self.free[self.add(part, start)].append(start)
            return self._after(start)
        end = self.state()
        for _ in range(high - low):
            self.free[start].append(end)
            start = self.add(part, self._after(start))
        self.free[start].append(end)
        return end

    def _after(self, start: int) -> int:
        """A new state after `start`, so that no loop leads back into what stands before."""
        end = self.state()
        self.free[start].append(end)
        return end

    def closure(self, states: frozenset[int]) -> frozenset[int]:
        waiting = list(states)
        found = set(states)
        while waiting:
            for following in self.free[waiting.pop()]:
                if following not in found:
                    found.add(following)
                    waiting.append(following)
        return frozenset(found)


@dataclass
class _Deterministic:
    """State 0 is the first; `table[state][class]` is the next one."""

    table: list[list[int]]
    final: set[int]


def _deterministic(node: Node, classes: list[Ranges]) -> _Deterministic:
    states = _Nondeterministic()
    end = states.add(node, states.state())
    first = states.closure(frozenset({0}))
    numbers = {first: 0}
    subsets = [first]
    table: list[list[int]] = []
    while len(table) < len(subsets):
        moves = [move for state in subsets[len(table)] for move in states.moves[state]]
        row = []
        for one_class in classes:
            reached = frozenset(target for ranges, target in moves if _has(ranges, one_class[0][0]))
            row.append(_number(states.closure(reached), numbers, subsets))
        table.append(row)
    return _Deterministic(table, {number for subset, number in numbers.items() if end in subset})


def _number(key: _Key, numbers: dict[_Key, int], keys: list[_Key]) -> int:
    """The number of a state, which may be new."""
    if key not in numbers:
        if len(keys) >= _MAX_SUBSETS:
            raise _too_large()
        numbers[key] = len(keys)
        keys.append(key)
    return numbers[key]


def _product(first: _Deterministic, second: _Deterministic, is_excluded: bool) -> _Deterministic:
    pairs = [(0, 0)]
    numbers = {(0, 0): 0}
    table: list[list[int]] = []
    while len(table) < len(pairs):
        one, other = pairs[len(table)]
        moves = zip(first.table[one], second.table[other], strict=True)
        table.append([_number(pair, numbers, pairs) for pair in moves])
    final = {
        number
        for (one, other), number in numbers.items()
        if one in first.final and (other in second.final) != is_excluded
    }
    return _minimal(_Deterministic(table, final))


def _minimal(automaton: _Deterministic) -> _Deterministic:
    """The same without states that nothing tells apart; the class of state 0 is 0."""
    table = automaton.table
    groups = [int(state in automaton.final) for state in range(len(table))]
    count = len({*groups})
    while True:
        signatures = [(groups[state], *(groups[target] for target in row)) for state, row in enumerate(table)]
        numbers: dict[tuple[int, ...], int] = {}
        groups = [numbers.setdefault(signature, len(numbers)) for signature in signatures]
        if len(numbers) == count:
            break
        count = len(numbers)
    merged: list[list[int]] = [[]] * count
    for state, row in enumerate(table):
        merged[groups[state]] = [groups[target] for target in row]
    return _Deterministic(merged, {groups[state] for state in automaton.final})


@dataclass(frozen=True)
class _Way:
    """The expression on the way from a state to another one, and how long it is."""

    node: Node
    size: int


_Ways = dict[int, dict[int, _Way]]
"""From each state to each that it leads to."""


def _expression(automaton: _Deterministic, classes: list[Ranges]) -> Node:
    """What leads from the first state to a final one."""
    alive = _alive(automaton)
    if 0 not in alive:
        return Choice(())
    start = len(automaton.table)
    end = start + 1
    ways: _Ways = {start: {0: _Way(_EMPTY, 0)}}
    for state in alive:
        ranges: dict[int, list[tuple[int, int]]] = {}
        for one_class, target in zip(classes, automaton.table[state], strict=True):
            if target in alive:
                ranges.setdefault(target, []).extend(one_class)
        ways[state] = {target: _Way(Chars(union(found)), 1) for target, found in ranges.items()}
        if state in automaton.final:
            ways[state][end] = _Way(_EMPTY, 0)
    left = set(alive)
    while left:
        state = min(left, key=lambda each: (_growth(ways, each), each))
        left.discard(state)
        _eliminate(ways, state)
    return ways[start][end].node


def _alive(automaton: _Deterministic) -> set[int]:
    """The states from which a final one can be reached."""
    alive = set(automaton.final)
    while True:
        more = {s for s, row in enumerate(automaton.table) if s not in alive and not alive.isdisjoint(row)}
        if not more:
            return alive
        alive |= more


def _growth(ways: _Ways, state: int) -> int:
    """How much longer the expressions get if `state` is eliminated."""
    before = [row[state].size for source, row in ways.items() if state in row and source != state]
    after = [way.size for target, way in ways[state].items() if target != state]
    loop = ways[state][state].size if state in ways[state] else 0
    repeated = loop * (len(before) * len(after) - 1)
    return sum(before) * (len(after) - 1) + sum(after) * (len(before) - 1) + repeated


def _eliminate(ways: _Ways, state: int) -> None:
    """Replace the ways over `state` by direct ones. Raises PatternError if they get too long."""
    following = ways.pop(state)
    loop = following.pop(state, None)
    for row in ways.values():
        if (before := row.pop(state, None)) is None:
            continue
        for target, after in following.items():
            way = _joined(before, loop, after)
            row[target] = _either(row[target], way) if target in row else way
            if row[target].size > _MAX_LENGTH:
                raise _too_large()


def _joined(before: _Way, loop: _Way | None, after: _Way) -> _Way:
    flat: list[Node] = []
    middle = () if loop is None else (Repeat(loop.node, 0, None),)
    for part in (before.node, *middle, after.node):
        flat += part.parts if isinstance(part, Join) else (part,)
    size = before.size + after.size + (0 if loop is None else loop.size)
    return _Way(flat[0] if len(flat) == 1 else Join(tuple(flat)), size)


def _either(one: _Way, other: _Way) -> _Way:
    if isinstance(one.node, Chars) and isinstance(other.node, Chars):
        return _Way(Chars(union([*one.node.ranges, *other.node.ranges])), 1)
    options = one.node.options if isinstance(one.node, Choice) else (one.node,)
    return _Way(Choice((*options, other.node)), one.size + other.size)
