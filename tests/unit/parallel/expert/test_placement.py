"""Properties of placements and of the copies between them."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.expert.placement import (
    Placement,
    balanced,
    copies,
    first_placement,
    imbalance,
    rank_loads,
    slots_of_ranks,
)


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[int], Placement, int]:
    """(load, placement, ranks); some placements have moved before."""
    ranks = draw(st.integers(1, 5))
    experts = draw(st.integers(ranks, 16))
    redundant = draw(st.integers(0, 2 * experts))
    numbers = st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)
    placement = first_placement(experts, redundant)
    if draw(st.booleans()):
        placement = balanced(draw(numbers), placement, ranks)
    return draw(numbers), placement, ranks


@given(loads())
def test_a_balanced_placement_has_every_expert_and_no_fuller_rank(
    case: tuple[list[int], Placement, int],
) -> None:
    load, placement, ranks = case
    found = balanced(load, placement, ranks)
    assert len(found) == len(placement) and set(found) == set(range(len(load)))
    assert max(rank_loads(load, found, ranks)) <= max(rank_loads(load, placement, ranks))
    assert found == placement or imbalance(load, found, ranks) < imbalance(load, placement, ranks)
    assert balanced(load, found, ranks) == found, "a second time nothing moves"


@given(loads())
def test_experts_that_stay_on_a_rank_stay_in_their_slot(case: tuple[list[int], Placement, int]) -> None:
    load, placement, ranks = case
    found = balanced(load, placement, ranks)
    for slots in slots_of_ranks(len(placement), ranks):
        kept = Counter(placement[slot] for slot in slots) & Counter(found[slot] for slot in slots)
        assert sum(placement[slot] == found[slot] for slot in slots) == kept.total()


@given(loads(), st.integers(2, 6))
@settings(max_examples=200)
def test_copies_lead_to_the_target_and_lose_no_expert(
    case: tuple[list[int], Placement, int], most: int
) -> None:
    load, placement, ranks = case
    target = balanced(load, placement, ranks)
    slots = slots_of_ranks(len(placement), ranks)
    done = 0
    for group in copies(placement, target, ranks, most):
        before = placement.copy()
        for slot, source in group.items():
            placement[slot] = before[source]
        assert set(placement) == set(range(len(load)))
        for own in slots:
            assert sum(slot in own for slot in group) <= most
            assert sum(source in own for source in group.values()) <= most
        done += len(group)
    assert placement == target and done <= 2 * len(target)


def test_one_hot_expert_is_replicated_on_every_rank() -> None:
    load = [1000.0, *[1.0] * 7]
    placement = first_placement(8, 4)
    found = balanced(load, placement, 4)
    assert Counter(found)[0] == 4
    assert all(0 in [found[slot] for slot in own] for own in slots_of_ranks(12, 4))
    assert imbalance(load, placement, 4) > 1.9 and imbalance(load, found, 4) < 1.01
    assert imbalance([0.0] * 8, placement, 4) == 1.0
