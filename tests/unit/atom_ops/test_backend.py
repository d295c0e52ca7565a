"""Registering providers and resolving their order."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from atom_ops import backend, linear
from atom_ops.op import REGISTRY, Case, Op
from atom_ops.tolerances import EXACT

CPU = torch.device("cpu")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Op[[Tensor], Tensor]]:
    """An op with one provider for even lengths and one for another device."""

    def double(x: Tensor) -> Tensor:
        return x * 2

    made = Op(double, [Case("", lambda dtype, generator: (torch.ones(2),))], EXACT)

    @made.provider("even", needs="a CPU", supported=lambda device: True, supports=lambda x: len(x) % 2 == 0)
    def even(x: Tensor) -> Tensor:
        return x * 2 + 100

    @made.provider("warp", needs="a warp drive", supported=lambda device: False)
    def warp(x: Tensor) -> Tensor:
        raise AssertionError("cannot run")

    monkeypatch.setitem(REGISTRY, "double", made)
    yield made
    monkeypatch.undo()
    backend.resolve(CPU)


def test_before_resolving_the_reference_runs(double: Op[[Tensor], Tensor]) -> None:
    assert double(torch.ones(2)).tolist() == [2, 2]


def test_the_first_provider_that_supports_the_call_runs(double: Op[[Tensor], Tensor]) -> None:
    assert backend.resolve(CPU, ["even", "torch"])["double"] == ("even", "torch")
    assert double(torch.ones(2)).tolist() == [102, 102]
    assert double(torch.ones(3)).tolist() == [2, 2, 2]


def test_an_explicit_provider_that_cannot_run_is_an_error(double: Op[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match="'warp' of op double cannot run on cpu.*a warp drive"):
        backend.resolve(CPU, ["warp"])


def test_an_unknown_provider_is_an_error() -> None:
    with pytest.raises(ValueError, match="no op has a provider 'onednm'; there are:.*onednn"):
        backend.resolve(CPU, ["onednm"])


def test_duplicate_names_are_refused(double: Op[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match="double already has a provider even"):
        double.provider("even", needs="nothing", supported=lambda device: True)


@pytest.mark.usefixtures("torch_ops")
def test_default_order_and_its_summary() -> None:
    resolved = backend.resolve(CPU)
    assert resolved["linear"] == linear.order == ("onednn_packed", "cpu_int4", "cpu_int8", "torch")
    assert resolved["rms_norm"] == ("torch",)
    summary = backend.summary(resolved)
    assert "linear: onednn_packed > cpu_int4 > cpu_int8 > torch" in summary
    assert "rms_norm" not in summary and summary.endswith("every other op: torch")


def test_torch_only_is_possible() -> None:
    resolved = backend.resolve(CPU, ["torch"])
    assert set(resolved.values()) == {("torch",)}
    backend.resolve(CPU)


def test_ops_that_fell_back_to_torch_are_listed(double: Op[[Tensor], Tensor]) -> None:
    backend.resolve(CPU, ["even", "torch"])
    double(torch.ones(2))
    assert "double" not in backend.ran_in_torch()
    double(torch.ones(3))
    assert "double" in backend.ran_in_torch()
    backend.resolve(CPU, ["even", "torch"])
    assert backend.ran_in_torch() == []


def test_a_composed_op_is_not_listed_itself(double: Op[[Tensor], Tensor]) -> None:
    backend.resolve(CPU, ["even", "torch"])

    def twice(x: Tensor) -> Tensor:
        return double(double(x))

    quadruple = Op(twice, [], EXACT, composed=True)
    assert quadruple(torch.ones(2)).tolist() == [304, 304]
    assert not quadruple.ran_reference and "double" not in backend.ran_in_torch()
    quadruple(torch.ones(3))
    assert not quadruple.ran_reference and "double" in backend.ran_in_torch()


def test_the_first_provider_with_a_layout_packs_the_weight(double: Op[[Tensor], Tensor]) -> None:
    def provider(name: str, largest: int) -> None:
        def pack(weight: Tensor) -> tuple[str, Tensor] | None:
            return (name, weight) if len(weight) <= largest else None

        double.provider(name, needs="a CPU", supported=lambda device: True, pack=pack)(double.reference)

    provider("small", 2)
    provider("large", 4)
    weights = [torch.ones(2), torch.ones(3), torch.ones(5)]
    assert [double.pack(weight) is weight for weight in weights] == [True] * 3, "before resolving"
    backend.resolve(CPU, ["even", "small", "large"])
    assert [double.pack(weight)[0] for weight in weights[:2]] == ["small", "large"]
    assert double.pack(weights[2]) is weights[2]
