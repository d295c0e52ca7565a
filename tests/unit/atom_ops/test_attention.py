"""Paged attention against the definition, one row and one head at a time."""

from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import atom_ops
from atom_ops import backend
from atom_ops.ops import attention_plan
from atom_ops.ops.kv_cache import FP8

CPU = torch.device("cpu")
SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Step:
    """A random step, with the keys and values of its rows also kept as plain tensors."""

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        heads: int = 6,
        kv_heads: int = 2,
        block_size: int = 16,
        cache_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(len(query_lens) * 1000 + sum(context_lens))
        self.heads, self.kv_heads, self.dtype = heads, kv_heads, dtype
        self.block_size = block_size
        self.query_lens = np.array(query_lens, np.int32)
        self.context_lens = np.array(context_lens, np.int32)
        needed = [-(-length // block_size) for length in context_lens]
        blocks = torch.randperm(sum(needed) + 5, generator=generator).numpy()
        # What lies behind a row's context must not matter: neither table entries nor memory.
        self.table = np.full((len(needed), max(needed) + 2), 10**6, np.int32)
        self.cache = atom_ops.make_kv_layer(sum(needed) + 5, block_size, kv_heads, 32, cache_dtype, CPU)
        if cache_dtype != FP8:
            self.cache.kv.fill_(torch.nan)
        self.rows: list[tuple[Tensor, Tensor]] = []
        used = 0
        for row, (count, length) in enumerate(zip(needed, context_lens, strict=True)):
            self.table[row, :count] = blocks[used : used + count]
            used += count
            k, v = torch.randn(2, length, kv_heads, 32, generator=generator).to(dtype)
            position = np.arange(length)
            slots = self.table[row][position // block_size] * block_size + position % block_size
            atom_ops.write_kv(k, v, self.cache, torch.from_numpy(slots.astype(np.int64)))
            self.rows.append((k, v))
        self.q = torch.randn(sum(query_lens), heads, 32, generator=generator).to(dtype)

    def plan(self) -> atom_ops.AttentionPlan:
        return atom_ops.plan_attention(
            self.query_lens, self.context_lens, self.table, self.block_size,
            self.heads, self.kv_heads, self.dtype, CPU,
        )  # fmt: skip

    def run(self) -> Tensor:
        return atom_ops.paged_attention(self.q, self.cache, self.plan(), 0.2)

    def expected(self) -> Tensor:
        out, first = [], 0
        for (k, v), count in zip(self.rows, self.query_lens.tolist(), strict=True):
            group = self.heads // self.kv_heads
            keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
            q = self.q[first : first + count].double()
            scores = torch.einsum("qhe,khe->hqk", q, keys) * 0.2
            ahead = torch.ones(count, len(k)).triu(len(k) - count + 1).bool()
            weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,khe->qhe", weights, values))
            first += count
        return torch.cat(out)


@pytest.fixture(params=["sdpa_cpu", "torch"], autouse=True)
def provider(request: pytest.FixtureRequest) -> None:
    backend.resolve(CPU, [request.param])


STEPS = {
    "one decode": ([1], [1]),
    "decodes": ([1] * 5, [1, 16, 17, 600, 2000]),
    "equal decodes": ([1] * 4, [32] * 4),
    "fresh prompt": ([50], [50]),
    "long prompt": ([700], [700]),
    "chunk of a prompt": ([64], [500]),
    "prompts": ([3, 130, 16, 2], [3, 130, 40, 900]),
    "mixed": ([1, 40, 1, 1, 7, 1], [300, 40, 1, 900, 600, 65]),
}


@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
def test_follows_the_definition(query_lens: list[int], context_lens: list[int]) -> None:
    step = Step(query_lens, context_lens)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    step = Step([1, 20, 1], [80, 20, 5], heads, kv_heads)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_block_sizes(block_size: int) -> None:
    step = Step([1, 20, 1], [300, 70, 5], block_size=block_size)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    step = Step([1, 20, 1], [700, 300, 5], dtype=dtype, cache_dtype=dtype)
    found = step.run()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), step.expected(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("cache_dtype", "error"), [(torch.bfloat16, 0.01), (FP8, 0.15)])
def test_narrow_cache(cache_dtype: torch.dtype, error: float) -> None:
    step = Step([1, 20, 1], [700, 300, 5], cache_dtype=cache_dtype)
    difference = (step.run().double() - step.expected()).abs()
    assert difference.max() < error
    assert difference.max() > error / 100, "nothing was rounded: the cache is not that narrow"


def test_bounded_memory_makes_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_PREFILL_LIMIT", 20_000)
    monkeypatch.setattr(attention_plan, "_DECODE_LIMIT", 20_000)
    step = Step([300, 1, 1, 1, 40], [2000, 900, 500, 3000, 40])
    assert len(step.plan().groups) == 4
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


class Calls(TorchDispatchMode):
    """Counts operator calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[object] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


def _calls(query_lens: list[int], context_lens: list[int]) -> Counter[object]:
    backend.resolve(CPU)
    step = Step(query_lens, context_lens)
    plan = step.plan()
    with Calls() as calls:
        atom_ops.paged_attention(step.q, step.cache, plan, 0.2)
    return calls.count


def test_work_does_not_grow_with_requests() -> None:
    few, many = _calls([1] * 8, [700, 3, 50, 9] * 2), _calls([1] * 128, [700, 3, 50, 9] * 32)
    assert few == many
    assert many[SDPA] == 1
    few, many = _calls([1, 30], [700, 300]), _calls([1, 9, 30, 70] * 16, [700, 9, 300, 90] * 16)
    assert few == many
    assert many[SDPA] == 2


def _gathered(context_lens: list[int]) -> int:
    lens = np.array(context_lens, np.int32)
    table: NDArray[np.int32] = np.zeros((len(lens), 300), np.int32)
    plan = atom_ops.plan_attention(np.ones_like(lens), lens, table, 16, 6, 2, torch.float32, CPU)
    return sum(group.slots.numel() for group in plan.groups)


@pytest.mark.parametrize("context_lens", [[20] * 50, [100] * 50, [4000] + [30] * 60, [500] * 9])
def test_little_padding(context_lens: list[int]) -> None:
    assert _gathered(context_lens) <= 1.7 * sum(context_lens)
