"""Tuning on a GPU treated as unknown: it ends, stores its plans, and results are right."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atom.shared.config.device import DeviceConfig
from atom_ops import backend, linear
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import engine_config, save_tiny, tiny
from workers.worker import Worker

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
SHAPES = ((4096, 1024), (1024, 3072), (1000, 72), (256, 36))
PHASE = "Tuning GEMM kernels"
Heard = list[tuple[str, int, int]]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from atom_ops.triton_impl.linear import linear as kernels
    from atom_ops.triton_impl.plans.shipped import ShippedPlans

    monkeypatch.setattr(kernels, "shipped_on", lambda device: ShippedPlans())
    kernels.plans_on.cache_clear()
    backend.resolve(GPU)
    yield
    kernels.plans_on.cache_clear()
    backend.resolve(CPU)


def some_weights(dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        torch.randn(shape, device=GPU).mul_(shape[1] ** -0.5).to(dtype) for shape in SHAPES for _ in range(3)
    ]


def forget() -> None:
    """Reset the caches as in a new process."""
    from atom_ops.triton_impl.linear import linear as kernels

    kernels.plans_on.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_match_torch_and_the_next_start_measures_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    from atom_ops.triton_impl.linear.linear import plans_on

    weights = some_weights(dtype)
    assert not linear.providers["triton"].supports(weights[0][:1, :], weights[0])
    heard: Heard = []
    start = time.monotonic()
    backend.tune(GPU, weights, tmp_path, lambda *progress: heard.append(progress))
    assert time.monotonic() - start < 60
    total = 4 * len(SHAPES)
    assert heard == [(PHASE, done, total) for done in range(total + 1)]
    found = dict(plans_on(GPU))
    assert found.keys() == set(SHAPES) and any(found.values())
    for weight in weights[:: len(weights) // len(SHAPES)]:
        for tokens in (1, 2, 5, 16, 17, 32, 33, 64, 65):
            x = torch.randn(tokens, weight.shape[1], device=GPU, dtype=dtype)
            tolerance = linear.tolerances[dtype]
            torch.testing.assert_close(
                linear(x, weight), linear.reference(x, weight),
                atol=tolerance.absolute, rtol=tolerance.relative,
            )  # fmt: skip
    forget()
    heard.clear()
    start = time.monotonic()
    backend.tune(GPU, weights, tmp_path, lambda *progress: heard.append(progress))
    assert time.monotonic() - start < 0.5
    assert (heard, dict(plans_on(GPU))) == ([], found)


def test_a_plan_that_needs_too_much_shared_memory_is_left_out() -> None:
    from atom_ops.triton_impl.plans.bench import GPUBench
    from atom_ops.triton_impl.plans.linear_plans import LinearPlan

    shape = SHAPES[0]
    fits = LinearPlan(16, False, 64, 128, 4, 3, least=2)
    immense = LinearPlan(16, False, 256, 512, 4, 6, least=2)
    assert GPUBench({shape: some_weights(torch.bfloat16)[:3]}).valid_plans([immense, fits], shape) == [fits]


def test_shapes_of_a_table_are_never_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from atom_ops.triton_impl.linear import linear as kernels
    from atom_ops.triton_impl.plans.shipped import ShippedPlans

    monkeypatch.setattr(kernels, "shipped_on", lambda device: ShippedPlans(dict.fromkeys(SHAPES, ())))
    backend.tune(GPU, some_weights(torch.bfloat16), tmp_path, lambda *progress: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_worker_tunes_at_its_first_start_alone(
    batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path / "cache"))
    checkpoint = save_tiny(tiny("llama-gqa"), tmp_path)[1]
    config = engine_config(block_size=16)
    device = DeviceConfig(device="cuda", cudagraph_capture_sizes="[]", batch_invariant=batch_invariant)
    config = dataclasses.replace(
        config, device=device, model=dataclasses.replace(config.model, dtype="bfloat16")
    )
    phases = []
    for _ in range(2):
        heard: Heard = []
        Worker(config, checkpoint, Mesh(GPU), lambda *progress, heard=heard: heard.append(progress)).load()
        phases.append({phase for phase, *_ in heard})
        forget()
    assert (PHASE in phases[0]) is not batch_invariant
    assert PHASE not in phases[1]
    assert (tmp_path / "cache").exists() is not batch_invariant
