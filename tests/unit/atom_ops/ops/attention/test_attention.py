"""Paged attention against the definition, one row and one head at a time."""

from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

import atom_ops
from atom_ops import backend
from atom_ops.ops.attention import attention_plan
from atom_ops.ops.attention.kv_cache import FP8
from atom_ops.triton_impl.hardware import target
from tests.helpers.kernels.paged_step import STEPS, Step

CPU = torch.device("cpu")
SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.fixture(params=["sdpa_cpu", "torch", *(["triton"] if target.INTERPRETED else [])], autouse=True)
def provider(request: pytest.FixtureRequest) -> str:
    backend.resolve(CPU, [request.param])
    return str(request.param)


@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
def test_follows_the_definition(query_lens: list[int], context_lens: list[int]) -> None:
    step = Step(query_lens, context_lens)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("window", "sinks"), [(1, False), (20, True), (128, False), (500, True), (0, True)])
@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
def test_windows_and_sinks(
    query_lens: list[int], context_lens: list[int], window: int, sinks: bool, provider: str
) -> None:
    """Block table entries and tokens before the window are poisoned."""
    if provider == "triton" and sum(query_lens) > 300 and window != 20:
        pytest.skip("takes the interpreter long, and other steps have this window")
    step = Step(query_lens, context_lens, window=window, sinks=sinks)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("window", "chunked"), [(0, False), (20, False), (33, True), (128, True)])
@pytest.mark.parametrize("width", [16, 32])  # of 16 features for the CPU's own kernels
def test_soft_caps_and_chunks(window: int, chunked: bool, width: int, provider: str) -> None:
    """Most scores are beyond the cap; tokens before a chunk are poisoned. Rows of many tokens span chunks."""
    step = Step(
        [1, 40, 1, 7, 1], [300, 40, 1, 600, 66], width=width, window=window, sinks=window == 20,
        soft_cap=0.5, chunked=chunked,
    )  # fmt: skip
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)
    if provider != "triton":
        step = Step([400, 3], [700, 66], width=width, window=window, chunked=chunked)
        torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [9, 100])
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_windows_of_other_blocks_and_heads(window: int, block_size: int) -> None:
    step = Step([1, 20, 1, 70], [300, 70, 5, 260], 9, 3, block_size, window=window, sinks=True)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("contexts", [[700, 5, 33, 64], [200] * 6, [40] * 130 + [300]])
def test_contexts_are_split_into_shares(contexts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A long context among short ones has more splits than equal ones have."""
    from atom_ops.triton_impl.attention import attention

    config = attention._KernelConfig(16, 32, 4, 1, programs=100, least_blocks=2, filled=3)
    monkeypatch.setattr(attention, "_decode_config", lambda *args: config)
    step = Step([1] * len(contexts), contexts, 2, 1)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    step = Step([1, 20, 1], [80, 20, 5], heads, kv_heads)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_block_sizes(block_size: int) -> None:
    step = Step([1, 20, 1], [300, 70, 5], block_size=block_size)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, window: int) -> None:
    step = Step([1, 20, 1], [700, 300, 5], dtype=dtype, cache_dtype=dtype, window=window, sinks=window > 0)
    found = step.run()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), step.expected(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("cache_dtype", "error"), [(torch.bfloat16, 0.01), (FP8, 0.15)])
def test_float8_cache(cache_dtype: torch.dtype, error: float) -> None:
    step = Step([1, 20, 1], [700, 300, 5], cache_dtype=cache_dtype)
    difference = (step.run().double() - step.expected()).abs()
    assert difference.max() < error
    assert difference.max() > error / 100, "nothing was rounded: the cache is not that narrow"


def test_groups_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    backend.resolve(CPU)
    monkeypatch.setattr(attention_plan, "_PREFILL_LIMIT", 20_000)
    monkeypatch.setattr(attention_plan, "_DECODE_LIMIT", 20_000)
    step = Step([300, 1, 1, 1, 40], [2000, 900, 500, 3000, 40])
    assert len(step.work()) == 4
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-6, rtol=1e-5)
    step = Step([300, 1, 1, 1, 40], [2000, 900, 500, 3000, 40], window=300, sinks=True)
    assert len(step.work()) == 2, "a window leaves less to gather"
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
        atom_ops.paged_attention(step.q, step.cache, plan, step.rule)
    return calls.count


def test_work_does_not_grow_with_requests() -> None:
    few, many = _calls([1] * 8, [700, 3, 50, 9] * 2), _calls([1] * 128, [700, 3, 50, 9] * 32)
    assert few == many
    assert many[SDPA] == 1
    few, many = _calls([1, 30], [700, 300]), _calls([1, 9, 30, 70] * 16, [700, 9, 300, 90] * 16)
    assert few == many
    assert many[SDPA] == 2


def _decodes(context_lens: list[int]) -> atom_ops.AttentionPlan:
    lens = np.array(context_lens, np.int32)
    table: NDArray[np.int32] = np.zeros((len(lens), -(-max(context_lens) // 16)), np.int32)
    return atom_ops.plan_attention(np.ones_like(lens), lens, table, CPU)


def _gathered(plan: atom_ops.AttentionPlan, window: int = 0) -> int:
    return sum(group.slots.numel() for group in plan.work_items(6, 2, 16, torch.float32, window))


@pytest.mark.parametrize("context_lens", [[20] * 50, [100] * 50, [4000] + [30] * 60, [500] * 9])
def test_little_padding(context_lens: list[int]) -> None:
    assert _gathered(_decodes(context_lens)) <= 1.7 * sum(context_lens)


def test_a_window_bounds_the_work() -> None:
    plan = _decodes([60, 128, 129, 5000, 60_000])
    assert _gathered(plan, window=128) == 5 * 128
    assert _gathered(plan) > 60_000, "layers of one plan each have items of their own"
