"""The plans that come with the project."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atom_ops.triton_impl.experts.expert_plans import PersistentPlan, VectorPlan
from atom_ops.triton_impl.plans import shipped
from atom_ops.triton_impl.plans.linear_plans import FusedPlan, LinearPlan, StreamKPlan
from atom_ops.triton_impl.plans.plan_file import PlanFile
from atom_ops.triton_impl.plans.plan_format import Machine
from atom_ops.triton_impl.plans.shipped import ShippedPlans, shipped_on, shipped_plans
from atom_ops.triton_impl.quantized.quantized_plans import LibraryPlan, PersistentGemvPlan

MEASURED = Machine("Some GPU", "2.11.0", "3.6.0")
VECTOR = LinearPlan(1, True, 4, 1024, 4, 1)
STREAM_K = StreamKPlan(33, 64, 64, 128, 6, 64)


@pytest.fixture(autouse=True)
def read_again() -> Iterator[None]:
    """Files are read once in a process."""
    for function in (shipped_plans, shipped._files):
        function.cache_clear()
    yield
    for function in (shipped_plans, shipped._files):
        function.cache_clear()


def test_plans_of_an_h200() -> None:
    plans = shipped_plans("NVIDIA H200")
    tables = (plans.linear, plans.quantized, plans.norm_linear, plans.silu_linear, plans.experts)
    assert [len(table) for table in tables] == [22, 20, 5, 1, 4]
    assert plans.linear[4096, 1024][0] == VECTOR and plans.linear[4096, 1024][-1] == STREAM_K
    assert plans.quantized["fp8-block", 4096, 12288][0] == PersistentGemvPlan(8, 4096, 8, 132)
    assert isinstance(plans.quantized["mxfp4", 4096, 4096][-1], LibraryPlan)
    assert plans.silu_linear == {(1024, 3072): FusedPlan(8, 8, 4096)}
    layer = plans.experts["plain", (128, 2048, 768)]
    assert isinstance(layer[0], VectorPlan) and layer[0].down.warps == 8
    assert isinstance(layer[-2], PersistentPlan)


def test_each_table_is_sorted_by_tokens() -> None:
    for content in shipped._files():
        for entry in (*content.linear, *content.quantized, *content.experts):
            tokens = [plan.tokens for plan in entry.plans]
            assert tokens == sorted(tokens), entry


def test_other_devices_have_none() -> None:
    assert shipped_plans("Some GPU") == shipped_on(torch.device("cpu")) == ShippedPlans()


def test_an_h100_uses_the_plans_of_an_h200_until_it_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same chip with other memory: without them the first start measures for up to 90 s."""
    h100 = "NVIDIA H100 80GB HBM3"
    assert shipped_plans(h100) == shipped_plans("NVIDIA H200")
    assert shipped_plans("NVIDIA H100 PCIe") == ShippedPlans()  # with 114 SMs
    for name, plan in (("NVIDIA H200", VECTOR), (h100, STREAM_K)):
        file = PlanFile(tmp_path, Machine(name, "2.11.0", "3.6.0"), lambda shape, plan: True)
        file.path.parent.mkdir(exist_ok=True)
        file.write({(64, 32): (plan,)})
    monkeypatch.setattr(shipped, "_DIRECTORY", file.path.parent)
    for function in (shipped_plans, shipped._files):
        function.cache_clear()
    assert shipped_plans(h100).linear == {(64, 32): (STREAM_K,)}
    assert shipped_plans("NVIDIA H200").linear == {(64, 32): (VECTOR,)}


def test_a_measured_file_is_dropped_in_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PlanFile(tmp_path, MEASURED, lambda shape, plan: True)
    file.path.parent.mkdir()
    file.write({(64, 32): (VECTOR, STREAM_K), ("mxfp4", 64, 32): (LibraryPlan(8),)})
    monkeypatch.setattr(shipped, "_DIRECTORY", file.path.parent)
    plans = shipped_plans("Some GPU")
    assert plans.linear == {(64, 32): (VECTOR, STREAM_K)}
    assert plans.quantized == {("mxfp4", 64, 32): (LibraryPlan(8),)}
    assert shipped_plans("NVIDIA H200") == ShippedPlans()
