"""Launches of the latent attention kernels."""

from typing import Any

import pytest
import torch

from atom_ops import LatentLayer, TopKIndices, backend
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.triton_impl.hardware import target

CPU = torch.device("cpu")
LAST_DIMENSIONS = 65_535
"""Most programs in the second and in the third dimension of a grid."""

pytestmark = pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")


class Recorder:
    """Stands for a kernel: keeps its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **options: self.options.append(options)


@pytest.fixture
def rows_kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    from atom_ops.triton_impl.latent import latent_attention as kernels

    backend.resolve(CPU, ["triton"])
    recorder = Recorder()
    monkeypatch.setattr(kernels, "_latent_rows", recorder)
    monkeypatch.setattr(kernels, "_combine", recorder)
    return recorder


TOKENS = 70_000
CACHE = LatentLayer(torch.zeros(4, 16, 48), 32)


@pytest.mark.parametrize("heads", [4, 64])
def test_a_step_of_many_tokens_fits_a_grid(rows_kernel: Recorder, heads: int) -> None:
    from atom_ops.triton_impl.latent.latent_attention import attend_latents
    from atom_ops.triton_impl.latent.sparse_attention import _plan_from

    q_THK = torch.zeros(1, 1, 1).expand(TOKENS, heads, 48)
    starts, table = torch.tensor([0, TOKENS]), torch.zeros(1, 4, dtype=torch.int32)
    prompt = AttentionPlan(table, torch.tensor([TOKENS]), starts, TOKENS, TOKENS, TOKENS, TOKENS)
    topk = TopKIndices(torch.zeros(TOKENS, 8, dtype=torch.int32), torch.ones(TOKENS, dtype=torch.int32))
    for plan in (prompt, _plan_from(topk)):
        attend_latents(q_THK, CACHE, plan, 1.0)
    assert len(rows_kernel.grids) == 2
    assert all(size <= LAST_DIMENSIONS for grid in rows_kernel.grids for size in grid[1:])


def test_only_inputs_of_the_step_are_read_before_the_wait(rows_kernel: Recorder) -> None:
    """A sparse layer's own kernels have just written what its attention reads."""
    from atom_ops.triton_impl.latent.latent_attention import attend_latents
    from atom_ops.triton_impl.latent.sparse_attention import _plan_from

    q_THK = torch.zeros(2, 4, 48)
    table, starts = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([0, 1, 2])
    decodes = AttentionPlan(table, torch.tensor([5, 6]), starts, 2, 1, 1, 6)
    attend_latents(q_THK, CACHE, decodes, 1.0)
    assert rows_kernel.options and all(options["EARLY"] for options in rows_kernel.options)
    rows_kernel.options.clear()
    topk = TopKIndices(torch.zeros(2, 600, dtype=torch.int32), torch.full((2,), 600, dtype=torch.int32))
    attend_latents(q_THK, CACHE, _plan_from(topk), 1.0)
    assert rows_kernel.options and not any(options["EARLY"] for options in rows_kernel.options)
