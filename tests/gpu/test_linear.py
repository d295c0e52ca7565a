"""`linear` for few tokens on a GPU: every measured plan, against float64."""

import pytest
import torch

from atom_ops import backend, linear
from atom_ops.op import REFERENCE

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def planned() -> list[tuple[int, int]]:
    if not torch.cuda.is_available():
        return []
    from atom_ops.triton_impl.plans.shipped import shipped_on

    return list(shipped_on(GPU).linear)


def error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    wanted = x.double() @ weight.double().T
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", planned(), ids=str)
def test_every_plan_is_as_exact_as_the_library(shape: tuple[int, int], dtype: torch.dtype) -> None:
    backend.resolve(GPU)
    provider = linear.providers["triton"]
    weight = torch.randn(shape, device=GPU).mul_(shape[1] ** -0.5).to(dtype)
    bias = torch.randn(shape[0], device=GPU, dtype=dtype)
    for tokens in (1, 2, 5, 16, 32, 33, 60, 64):
        x = torch.randn(tokens, shape[1], device=GPU, dtype=dtype)
        if provider.supports is None or not provider.supports(x, weight):
            continue
        found = provider.function(x, weight)
        assert error(found, x, weight) < 1.05 * error(linear.reference(x, weight), x, weight)
        with_bias = provider.function(x, weight, bias)
        torch.testing.assert_close(with_bias, found + bias, atol=0.03, rtol=0.01)
    backend.resolve(CPU)


def test_other_shapes_and_many_tokens_use_the_library() -> None:
    backend.resolve(GPU)
    supports = linear.providers["triton"].supports
    assert supports is not None
    weight = torch.zeros(4096, 1024, device=GPU, dtype=torch.bfloat16)
    assert not supports(weight.new_zeros(128, 1024), weight)
    assert not supports(weight.new_zeros(0, 1024), weight)
    assert not supports(weight.new_zeros(1, 1016), weight[:, :1016].contiguous())
    assert not supports(weight.new_zeros(1, 1024).float(), weight.float())
    assert linear.order[-1] == REFERENCE
    backend.resolve(CPU)


@pytest.mark.skipif((4096, 4096) not in planned(), reason="needs a GPU with measured plans")
def test_a_captured_gemm_follows_its_inputs_and_rows_do_not_depend_on_the_batch() -> None:
    backend.resolve(GPU)
    weight = torch.randn(4096, 4096, device=GPU, dtype=torch.bfloat16)
    x = torch.randn(16, 4096, device=GPU, dtype=torch.bfloat16)
    linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, linear(x, weight))
    assert torch.equal(out[3:5], linear(x[3:5].clone(), weight))
    backend.resolve(CPU)


@pytest.mark.skipif((4096, 4096) not in planned(), reason="needs a GPU with measured plans")
@pytest.mark.parametrize("shape", planned(), ids=str)
def test_split_k_is_reduced_in_one_order(shape: tuple[int, int]) -> None:
    """Repeatedly, in a graph: each launch leaves the workspace as it was."""
    backend.resolve(GPU)
    weight = torch.randn(shape, device=GPU).mul_(shape[1] ** -0.5).bfloat16()
    x = torch.randn(64, shape[1], device=GPU, dtype=torch.bfloat16)
    first = linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [linear(x, weight) for _ in range(5)]
    for _ in range(20):
        graph.replay()
    assert all(torch.equal(out, first) for out in outs)
    backend.resolve(CPU)
