"""Sampling tokens on a GPU at sizes of real models, against the reference on the same device."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from atom_ops import SamplingBatch, apply_logits_processors, backend, record_sampled, sample, token_logprobs
from atom_ops.op import Op
from tests.helpers.kernels.op_cases import changed

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
    """Rows with each filter in turn."""

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
    torch.manual_seed(0)
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
    # The two best tokens may be within float32 rounding of each other.
    assert (found != wanted).sum() <= 1
    for name, limits in LIMITS.items():
        alone = kernel(logits[:1], batch(1, [limits]), positions[:1])
        together = kernel(logits, batch(70, [limits]), positions)
        assert alone[0] == together[0], name


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 257, 4133])
@pytest.mark.parametrize("rows", [1, 9])
def test_small_vocabularies_inside_wider_rows(rows: int, vocabulary: int) -> None:
    """The memory next to a row's logits holds larger values."""
    logits = torch.full((rows + 1, vocabulary + 7), 100.0, device=GPU)
    inside = logits[:rows, :vocabulary].normal_(0, 3)
    positions = torch.arange(rows, device=GPU)
    for limits in LIMITS.values():
        settings = batch(rows, [limits])
        wanted = sample.reference(inside.contiguous(), settings, positions)
        assert torch.equal(kernel(inside, settings, positions), wanted)


def test_a_captured_call_follows_its_inputs() -> None:
    """Logits, positions and sampling parameters change between replays."""
    rows, limits = 9, list(LIMITS.values())
    logits = torch.randn(rows, 151936, device=GPU, dtype=torch.bfloat16)
    positions = torch.arange(rows, device=GPU)
    settings = dataclasses.replace(batch(rows, limits), random_rows=None, filtered_rows=None)
    kernel(logits, settings, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = kernel(logits, settings, positions)
    for turn in range(1, 5):
        logits.normal_(0, 3)
        positions += 7
        others = batch(rows, limits[turn:] + limits[:turn])
        for column in ("temperature_R", "top_k_R", "top_p_R", "min_p_R", "seed_R", "sequence_R"):
            getattr(settings, column).copy_(getattr(others, column))
        graph.replay()
        assert torch.equal(sampled, kernel(logits, others, positions))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize(
    "op", [sample, apply_logits_processors, record_sampled, token_logprobs], ids=lambda op: op.name
)
def test_no_synchronisation(op: Op[..., Any]) -> None:
    for case in op.cases:
        given = case.make(torch.float32, torch.Generator().manual_seed(3))
        arguments = changed(given, lambda tensor: tensor.to(GPU))
        op(*arguments)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            op(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [49152, 151936])
def test_a_sample_does_not_depend_on_the_batch_and_repeats(vocabulary: int, dtype: torch.dtype) -> None:
    """Logits as of language models: few tokens far above a long tail."""
    peaks = torch.rand(64, 40, device=GPU).mul_(12)
    logits = torch.randn(64, vocabulary, device=GPU).mul_(2.5)
    logits.scatter_add_(1, torch.randint(0, vocabulary, (64, 40), device=GPU), peaks)
    logits = logits.to(dtype)
    for limits in ({"top_p": 0.95}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.02}, {}):
        together = batch(64, [limits])
        for start in range(0, 64 * 20, 64):
            positions = torch.arange(start, start + 64, device=GPU)
            wanted = kernel(logits, together, positions)
            assert torch.equal(kernel(logits, together, positions), wanted)
            for rows in (1, 5, 40):
                first = kernel(logits[:rows], batch(rows, [limits]), positions[:rows])
                assert torch.equal(first, wanted[:rows]), (limits, rows, start)
