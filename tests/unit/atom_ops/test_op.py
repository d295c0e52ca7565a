"""Providers of an op."""

import pytest
import torch

from atom_ops.op import Op
from atom_ops.tolerances import DEFAULT


def anywhere(device: torch.device) -> bool:
    return True


@pytest.fixture
def planned() -> list[int]:
    """The arguments of each call of the plan."""
    return []


@pytest.fixture
def double(planned: list[int]) -> Op[[int], str]:
    def reference(x: int) -> str:
        return f"torch {2 * x}"

    op: Op[[int], str] = Op(reference, [], DEFAULT)

    def plan(x: int) -> str | None:
        planned.append(x)
        return f"shift by {x % 2}" if x < 8 else None

    @op.provider("fast", needs="nothing", supported=anywhere, plan=plan)
    def fast(x: int, plan: str | None = None) -> str:
        return f"{plan} {2 * x}"

    op.use(["fast"])
    return op


def test_a_call_is_planned_once(double: Op[[int], str], planned: list[int]) -> None:
    assert double(3) == "shift by 1 6" and planned == [3]
    assert double(x=2) == "shift by 0 4" and planned == [3, 2]
    assert not double.ran_reference


def test_without_a_plan_the_next_provider_runs(double: Op[[int], str], planned: list[int]) -> None:
    assert double(9) == "torch 18" and planned == [9]
    assert double.ran_reference


def test_a_plan_says_what_is_supported(double: Op[[int], str]) -> None:
    fast = double.providers["fast"]
    assert fast.supports is not None and fast.supports(3) and not fast.supports(9)
