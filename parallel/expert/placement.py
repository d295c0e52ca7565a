"""Which expert is in which slot: placements for a load, and the copies that lead from one to another.

A slot has room for one expert. With X experts and N redundant ones there are X + N slots, spread over the
ranks in order; an expert is in one slot or several, its replicas. A placement lists the expert of every slot.

Everything here is a pure function of host numbers: ranks with the same load compute the same placement.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from parallel.sharding import split

Placement = list[int]
Copies = dict[int, int]
"""Slot -> the slot whose expert it gets. All of them are read before any is written."""

_WORTH = 0.95
"""A placement is changed if the fullest rank then has less than this share of its load."""


def first_placement(experts: int, redundant: int) -> Placement:
    """One slot for each expert in order, then the first experts again."""
    return [slot % experts for slot in range(experts + redundant)]


def slots_of_ranks(slots: int, ranks: int) -> list[range]:
    """The slots of each rank, as `ExpertDispatch.local_experts` spreads them."""
    shares = [split(slots, ranks, rank) for rank in range(ranks)]
    return [range(first, first + count) for first, count in shares]


def rank_loads(load: Sequence[float], placement: Placement, ranks: int) -> list[float]:
    """The load of each rank if every expert's is shared equally by its replicas."""
    replicas = Counter(placement)
    return [
        sum(load[placement[slot]] / replicas[placement[slot]] for slot in slots)
        for slots in slots_of_ranks(len(placement), ranks)
    ]


def imbalance(load: Sequence[float], placement: Placement, ranks: int) -> float:
    """The load of the fullest rank over the mean of the ranks; 1 without load."""
    loads = rank_loads(load, placement, ranks)
    total = sum(loads)
    return max(loads) * ranks / total if total else 1.0


def balanced(load: Sequence[float], placement: Placement, ranks: int) -> Placement:
    """A placement for `load` in the slots of `placement`, which is returned where a new one gains little.

    The redundant slots go, one after another, to the expert with the most load per replica; then replicas
    are put on ranks, the heaviest first, each on the emptiest rank that does not have that expert yet.
    What a rank has already stays in its slot.
    """
    slots = slots_of_ranks(len(placement), ranks)
    replicas = _replicas(load, len(placement) - len(load), ranks)
    on_ranks = _packed(load, replicas, [len(each) for each in slots])
    found = placement.copy()
    for own, experts in zip(slots, on_ranks, strict=True):
        _arrange(found, own, experts)
    before, after = (max(rank_loads(load, each, ranks)) for each in (placement, found))
    return found if after < _WORTH * before else placement


def _replicas(load: Sequence[float], redundant: int, ranks: int) -> list[int]:
    """Replicas of each expert; more than one on each rank only where there are more slots than that."""
    replicas = [1] * len(load)
    heap = [(-each, expert) for expert, each in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(redundant):
        _, expert = heapq.heappop(heap)
        replicas[expert] += 1
        everywhere = replicas[expert] >= ranks
        heapq.heappush(heap, (1.0 if everywhere else -load[expert] / replicas[expert], expert))
    return replicas


def _packed(load: Sequence[float], replicas: Sequence[int], room: Sequence[int]) -> list[list[int]]:
    """The experts of each rank, which has that much room."""
    packed: list[list[int]] = [[] for _ in room]
    loads = [0.0] * len(room)
    each = [share / count for share, count in zip(load, replicas, strict=True)]
    order = sorted(range(len(load)), key=lambda expert: (-each[expert], expert))
    for expert in order:
        for _ in range(replicas[expert]):
            free = (rank for rank in range(len(room)) if len(packed[rank]) < room[rank])
            rank = min(free, key=lambda rank: (expert in packed[rank], loads[rank], rank))
            packed[rank].append(expert)
            loads[rank] += each[expert]
    return packed


def _arrange(placement: Placement, slots: range, experts: Sequence[int]) -> None:
    """Put `experts` into `slots`, those that are there already into the same slot."""
    missing = Counter(experts)
    free = []
    for slot in slots:
        if missing[placement[slot]] > 0:
            missing[placement[slot]] -= 1
        else:
            free.append(slot)
    for slot, expert in zip(free, missing.elements(), strict=True):
        placement[slot] = expert


def copies(placement: Placement, target: Placement, ranks: int, most: int) -> Iterator[Copies]:
    """The copies that lead to `target`, in groups that are done at once.

    After each group every expert is in some slot. In a group no rank sends or receives more than `most`
    experts, which is at least 2.
    """
    owner = [rank for rank, slots in enumerate(slots_of_ranks(len(placement), ranks)) for _ in slots]
    source = list(range(len(placement)))  # whose expert, at the group's begin, each slot has now
    group: Copies = {}
    for changed in _changes(placement, target):
        moved = source.copy()
        for slot, other in changed.items():
            moved[slot] = source[other]
        wider = {slot: origin for slot, origin in enumerate(moved) if origin != slot}
        if group and _busiest(wider, owner) > most:
            yield group
            moved = list(range(len(placement)))
            for slot, other in changed.items():
                moved[slot] = other
            wider = dict(changed)
        source = moved
        group = wider
    if group:
        yield group


def _changes(placement: Placement, target: Placement) -> Iterator[Copies]:
    """One copy, or an exchange of two slots, after another; each leaves every expert in some slot."""
    now = placement.copy()
    where: defaultdict[int, set[int]] = defaultdict(set)
    for slot, expert in enumerate(now):
        where[expert].add(slot)
    wrong = {slot for slot, expert in enumerate(now) if expert != target[slot]}
    while wrong:
        # Where no expert in a wrong slot has another replica, these slots are a permutation of the target's.
        slot = min(wrong, key=lambda slot: (len(where[now[slot]]) == 1, slot))
        sole = len(where[now[slot]]) == 1
        other = min(where[target[slot]] & wrong if sole else where[target[slot]])
        expert = now[slot]
        wanted = target[slot]
        where[expert].remove(slot)
        where[wanted].add(slot)
        now[slot] = wanted
        if sole:
            where[wanted].remove(other)
            where[expert].add(other)
            now[other] = expert
        yield {slot: other, other: slot} if sole else {slot: other}
        wrong -= {each for each in (slot, other) if now[each] == target[each]}


def _busiest(group: Copies, owner: Sequence[int]) -> int:
    """The most experts that a rank sends, or receives."""
    arriving = Counter(owner[slot] for slot in group)
    leaving = Counter(owner[slot] for slot in group.values())
    return max(*arriving.values(), *leaving.values())
