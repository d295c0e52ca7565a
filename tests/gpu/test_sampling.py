"""Drawing tokens on a GPU at sizes of real models, beside the reference on the same device."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from atom_ops import SamplingBatch, backend, record_drawn, rule_logits, sample

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LIMITS = {
    "greedy": {"temperature": 0.0},
    "free": {},
    "top-k, top-p": {"top_k": 20, "top_p": 0.95},
    "top-p": {"top_p": 0.95},
    "large top-k": {"top_k": 3000, "top_p": 0.9},
    "min-p": {"min_p": 0.02},
    "all": {"temperature": 1.4, "top_k": 300, "top_p": 0.7, "min_p": 1e-4},
}


def batch(rows: int, limits: list[dict[str, float]]) -> SamplingBatch:
    """The limits in turn."""

    def column(name: str, off: float, dtype: type) -> np.ndarray:
        return np.array([limits[row % len(limits)].get(name, off) for row in range(rows)], dtype)

    return SamplingBatch.from_host(
        column("temperature", 1.0, np.float32),
        column("top_k", 0, np.int64),
        column("top_p", 1.0, np.float32),
        column("min_p", 0.0, np.float32),
        np.arange(rows).astype(np.uint64),
        np.zeros(rows, np.int64),
        GPU,
    )


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    backend.resolve(GPU)
    yield
    backend.resolve(CPU)


def kernel(logits: torch.Tensor, settings: SamplingBatch, positions: torch.Tensor) -> torch.Tensor:
    return sample.providers["triton"].function(logits, settings, positions)


@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [151936, 128256, 50257])
def test_same_ids_as_the_reference(vocabulary: int, dtype: torch.dtype, spread: float) -> None:
    logits = torch.randn(70, vocabulary, device=GPU).mul_(spread).to(dtype)
    positions = torch.arange(70, device=GPU)
    settings = batch(70, list(LIMITS.values()))
    found, wanted = kernel(logits, settings, positions), sample.reference(logits, settings, positions)
    # A draw within the rounding of float32 sums of a boundary may go to either side.
    assert (found != wanted).sum() <= 1
    for name, limits in LIMITS.items():
        alone = kernel(logits[:1], batch(1, [limits]), positions[:1])
        together = kernel(logits, batch(70, [limits]), positions)
        assert alone[0] == together[0], name


def test_a_captured_draw_follows_its_inputs() -> None:
    logits = torch.randn(9, 151936, device=GPU, dtype=torch.bfloat16)
    positions = torch.arange(9, device=GPU)
    settings = batch(9, list(LIMITS.values()))
    kernel(logits, settings, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = kernel(logits, settings, positions)
    for _ in range(3):
        logits.normal_(0, 3)
        positions += 7
        graph.replay()
        assert torch.equal(drawn, kernel(logits, settings, positions))


def on_gpu(value: Any) -> Any:
    """The same argument with its tensors on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.to(GPU)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: on_gpu(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


@pytest.mark.parametrize("op", [sample, rule_logits, record_drawn], ids=lambda op: op.name)
def test_nothing_waits_for_the_device(op: Any) -> None:
    for case in op.cases:
        arguments = tuple(map(on_gpu, case.make(torch.float32, torch.Generator().manual_seed(3))))
        op(*arguments)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            op(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
