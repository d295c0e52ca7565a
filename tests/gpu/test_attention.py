"""Paged attention on a GPU: against the definition, captured, and bit by bit."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import atom_ops
from atom_ops import AttentionPlan, KVLayer, backend
from atom_ops.ops.attention.kv_cache import FP8
from tests.helpers.kernels.paged_step import CPU, STEPS, Step

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, BF16: 2e-2}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    backend.resolve(GPU, ["triton"])
    yield
    backend.resolve(CPU)


def check(step: Step, error: float) -> None:
    found = step.run()
    assert found.dtype == step.dtype
    torch.testing.assert_close(found.double().cpu(), step.expected(), atol=error, rtol=error)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
def test_follows_the_definition(query_lens: list[int], context_lens: list[int], dtype: torch.dtype) -> None:
    step = Step(query_lens, context_lens, 8, 2, dtype=dtype, cache_dtype=dtype, width=64, device=GPU)
    check(step, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(8, 2, 64), (64, 8, 64), (9, 3, 128)])
@pytest.mark.parametrize(("window", "sinks"), [(1, False), (20, True), (128, True), (500, False), (0, True)])
@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
def test_windows_and_sinks(
    query_lens: list[int],
    context_lens: list[int],
    window: int,
    sinks: bool,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    step = Step(query_lens, context_lens, *heads[:2], dtype=dtype, cache_dtype=dtype, width=heads[2],
                device=GPU, window=window, sinks=sinks)  # fmt: skip
    check(step, TOLERANCE[dtype])


@pytest.mark.parametrize("width", [16, 32, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (16, 8), (32, 8), (20, 1)])
def test_shapes_of_models(width: int, heads: int, kv_heads: int) -> None:
    step = Step(
        [1, 150, 1, 3],
        [800, 150, 5, 9],
        heads,
        kv_heads,
        dtype=BF16,
        cache_dtype=BF16,
        width=width,
        device=GPU,
    )
    check(step, TOLERANCE[BF16])


@pytest.mark.parametrize("block_size", [1, 7, 64, 256])
def test_block_sizes(block_size: int) -> None:
    step = Step([1, 20, 1], [300, 70, 5], block_size=block_size, dtype=BF16, cache_dtype=BF16, device=GPU)
    check(step, TOLERANCE[BF16])


@pytest.mark.parametrize("cache_dtype", [BF16, FP8])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("window", "width"), [(0, 128), (100, 64), (40, 80)])
def test_float8_cache(window: int, width: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Against the reference in float32, which reads the same rounded values; sinks with the window."""
    step = Step([1, 20, 1, 200, 1], [700, 300, 5, 200, 5000], dtype=dtype, cache_dtype=cache_dtype,
                width=width, device=GPU, window=window, sinks=window > 0)  # fmt: skip
    check_float8(step, TOLERANCE[dtype])


def check_float8(step: Step, error: float) -> None:
    scale = step.cache.scale
    cache = KVLayer(step.cache.kv.cpu(), None if scale is None else scale.cpu())
    plan = atom_ops.plan_attention(step.query_lens, step.context_lens, step.table, CPU)
    sinks_H = None if step.rule.sinks_H is None else step.rule.sinks_H.float().cpu()
    rule = dataclasses.replace(step.rule, sinks_H=sinks_H)
    wanted = atom_ops.paged_attention.reference(step.q.float().cpu(), cache, plan, rule)
    torch.testing.assert_close(step.run().float().cpu(), wanted, atol=error, rtol=error)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(BF16, FP8), (torch.float16, FP8), (BF16, BF16)])
@pytest.mark.parametrize("block_size", [16, 7, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(32, 8, 1), (32, 8, 2), (40, 8, 1), (64, 8, 1)])
def test_many_decodes(
    heads: int, kv_heads: int, tokens: int, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """So many that other kernels may take them, of very different lengths; one row is a prompt's chunk."""
    contexts = [3000, 2, 31, 32, 33, 129, 700, 16, 17, 500, 128, 64]
    step = Step([*[tokens] * 11, 40], contexts, heads, kv_heads, dtype=dtype, cache_dtype=cache_dtype,
                width=128, block_size=block_size, device=GPU)  # fmt: skip
    check_float8(step, TOLERANCE[dtype])


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("cache_dtype", [BF16, FP8])
def test_more_rows_than_are_summed_at_once(cache_dtype: torch.dtype, width: int) -> None:
    """The lengths of all rows decide into how many splits a context is divided."""
    contexts = [20, 700] * 90 + [6000]
    step = Step([1] * 181, contexts, 2, 1, dtype=BF16, cache_dtype=cache_dtype, width=width, device=GPU)
    check_float8(step, TOLERANCE[BF16])


def test_padding_rows_of_a_float8_cache() -> None:
    """They have a token but no context, and result in zeros."""
    contexts = [700, 1, 16, 17, 3000, 31, 32, 33, 129, 500]
    step = Step([1] * 10, contexts, 32, 8, dtype=BF16, cache_dtype=FP8, width=128, device=GPU)
    table = torch.zeros(16, step.table.shape[1], dtype=torch.int32, device=GPU)
    table[:10] = torch.from_numpy(step.table)
    lens = torch.tensor(contexts + [0] * 6, dtype=torch.int32, device=GPU)
    plan = AttentionPlan(table, lens, torch.arange(17, dtype=torch.int32, device=GPU), 16, 1, 1, 4096)
    q = torch.full((16, 32, 128), torch.nan, dtype=BF16, device=GPU)
    q[:10] = step.q
    out = atom_ops.paged_attention(q, step.cache, plan, step.rule)
    torch.testing.assert_close(out[:10], step.run(), atol=2e-2, rtol=2e-2)
    assert not out[10:].any()


@pytest.mark.parametrize("window", [0, 40])
def test_one_graph_runs_any_smaller_batch(window: int) -> None:
    """Fewer rows than captured: padding rows have no context and result in zeros. Sinks with the window."""
    rows, width = 8, 200
    table = torch.zeros(rows, width, dtype=torch.int32, device=GPU)
    contexts = torch.zeros(rows, dtype=torch.int32, device=GPU)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=GPU)
    plan = AttentionPlan(table, contexts, starts, rows, 1, 1, width * 16)
    steps = [Step([1] * len(lens), lens, dtype=BF16, cache_dtype=BF16, device=GPU, window=window)
             for lens in ([1, 40, 700], [3, 2000, 17, 16, 1, 900, 64, 65])]  # fmt: skip
    rule = dataclasses.replace(steps[0].rule, sinks_H=torch.randn(6, device=GPU).to(BF16) if window else None)
    for step in steps:
        step.rule = rule
    blocks = max(len(step.cache.kv) for step in steps)
    cache = atom_ops.make_kv_layer(blocks, 16, 2, 32, BF16, GPU)
    q = torch.zeros(rows, 6, 32, dtype=BF16, device=GPU)
    atom_ops.paged_attention(q, cache, plan, rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = atom_ops.paged_attention(q, cache, plan, rule)
    for step in (*steps, steps[0]):
        count = len(step.q)
        q[:count], q[count:] = step.q, torch.nan
        cache.kv[: len(step.cache.kv)] = step.cache.kv
        table[:count, : step.table.shape[1]] = torch.from_numpy(step.table)
        contexts.zero_()[:count] = torch.from_numpy(step.context_lens)
        graph.replay()
        torch.testing.assert_close(out[:count].double().cpu(), step.expected(), atol=2e-2, rtol=2e-2)
        assert not out[count:].any()


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (0, True), (200, True), (600, False)])
@pytest.mark.parametrize("split_tokens", [256, 512])
def test_fixed_splits_make_bits_independent_of_batch_and_phase(
    split_tokens: int, window: int, sinks: bool
) -> None:
    """The last token of a prompt: as part of it, as a decode alone, as one of a batch."""

    def last_token(step: Step, rows: list[int], query_len: int) -> torch.Tensor:
        lens = np.full(len(rows), query_len, np.int32)
        plan = atom_ops.plan_attention(lens, step.context_lens[rows], step.table[rows], GPU)
        plan = dataclasses.replace(plan, split_tokens=split_tokens)
        ends = torch.tensor(step.query_lens).cumsum(0)[rows]
        tokens = torch.cat([torch.arange(end - query_len, end) for end in ends.tolist()])
        found = atom_ops.paged_attention(step.q[tokens.to(GPU)], step.cache, plan, step.rule)
        return found[query_len - 1 :: query_len]

    lens = [1500, 900, 300, 70]
    step = Step(lens, lens, 16, 8, dtype=BF16, cache_dtype=BF16, width=128, device=GPU, window=window,
                sinks=sinks)  # fmt: skip
    together = last_token(step, [0, 1, 2, 3], 1)
    for row in range(4):
        for query_len in (1, 2, 40, 70):
            assert torch.equal(last_token(step, [row], query_len)[0], together[row]), (row, query_len)
    plan = dataclasses.replace(step.plan(), split_tokens=split_tokens)
    whole = atom_ops.paged_attention(step.q, step.cache, plan, step.rule)
    assert torch.equal(whole[torch.tensor(lens).cumsum(0).to(GPU) - 1], together)


def test_repeats_itself() -> None:
    step = Step([1] * 3 + [90], [3000, 500, 20, 90], dtype=BF16, cache_dtype=BF16, width=128, device=GPU)
    first = step.run()
    assert all(torch.equal(step.run(), first) for _ in range(20))


# Whole prompts and chunks, with decodes or alone; not whole tiles, and of very different lengths.
PROMPTS = {
    "one": ([512], [512]),
    "not whole tiles": ([700, 513, 1030], [700, 513, 1030]),
    "after decodes": ([1, 1, 1, 900, 640], [300, 1, 77, 900, 640]),
    "among others": ([1, 600, 3, 530, 64, 1000, 5], [2000, 600, 3, 900, 64, 1000, 40]),
    "short ones": ([9, 33, 128, 17, 70, 5, 31], [9, 33, 128, 17, 70, 5, 31]),
    "chunks": ([128, 40, 300, 129], [3000, 1017, 428, 130]),
    "in turns": ([130, 40] * 40, [400, 700] * 40),
    "more items than programs": ([50] * 60 + [700], [*range(60, 1260, 20), 900]),
}


def by_other_kernels(step: Step) -> torch.Tensor:
    """The same step without the kernel for prompts."""
    from atom_ops.triton_impl.attention import hopper_attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_attention, "supports", lambda *args: False)
        return step.run()


@pytest.fixture
def prompt_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that the kernel for prompts is used."""
    from atom_ops.triton_impl.hardware.target import is_hopper

    if not is_hopper(GPU):
        pytest.skip("needs a Hopper GPU")
    from atom_ops.triton_impl.attention import hopper_attention

    attend, calls = hopper_attention.attend, []

    def counted(*args: Any) -> None:
        calls.append(args)
        attend(*args)

    monkeypatch.setattr(hopper_attention, "attend", counted)
    yield
    assert calls


def check_prompts(step: Step) -> None:
    error = TOLERANCE[step.dtype]
    torch.testing.assert_close(step.run(), by_other_kernels(step), atol=error, rtol=error)


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (16, 8, 128), (64, 8, 64), (8, 1, 128), (40, 8, 128)])
@pytest.mark.parametrize(("query_lens", "context_lens"), PROMPTS.values(), ids=PROMPTS)
def test_prompts(
    query_lens: list[int], context_lens: list[int], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check_prompts(Step(query_lens, context_lens, *heads[:2], dtype=dtype, cache_dtype=dtype, width=heads[2],
                       device=GPU))  # fmt: skip


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("window", "sinks"), [(1, False), (20, True), (128, True), (500, False), (0, True)])
@pytest.mark.parametrize("heads", [(64, 8, 64), (9, 3, 128)])
@pytest.mark.parametrize(("query_lens", "context_lens"), PROMPTS.values(), ids=PROMPTS)
def test_prompts_with_windows_and_sinks(
    query_lens: list[int],
    context_lens: list[int],
    heads: tuple[int, int, int],
    window: int,
    sinks: bool,
    block_size: int,
) -> None:
    check_prompts(Step(query_lens, context_lens, *heads[:2], dtype=BF16, cache_dtype=BF16, width=heads[2],
                       block_size=block_size, device=GPU, window=window, sinks=sinks))  # fmt: skip


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [64, 128])
def test_prompts_in_blocks_of_every_size(width: int, block_size: int) -> None:
    check_prompts(Step(*PROMPTS["among others"], 8, 2, block_size, BF16, BF16, width, GPU))


def test_prompts_in_other_blocks() -> None:
    check_prompts(Step(*PROMPTS["among others"], 8, 2, 256, BF16, BF16, 128, GPU))


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("cache_dtype", [BF16, FP8])
@pytest.mark.parametrize("name", [name for name, (query_lens, _) in PROMPTS.items() if len(query_lens) < 16])
def test_prompts_of_a_padded_step_without_host_rows(name: str, cache_dtype: torch.dtype, window: int) -> None:
    """As a captured step: the kernels find the prompts, among padding tokens and rows."""
    step = Step(*PROMPTS[name], 16, 8, dtype=BF16, cache_dtype=cache_dtype, width=128, device=GPU,
                window=window)  # fmt: skip
    tokens = len(step.q)
    plan = step.plan().padded(tokens + 90, 16)
    q = torch.cat((step.q, torch.full_like(step.q[:90], torch.nan)))
    out = atom_ops.paged_attention(q, step.cache, dataclasses.replace(plan, host=None), step.rule)
    expected = by_other_kernels(step)
    torch.testing.assert_close(out[:tokens], expected, atol=TOLERANCE[BF16], rtol=TOLERANCE[BF16])


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("cache_dtype", [BF16, FP8])
def test_one_graph_runs_other_prompts(cache_dtype: torch.dtype) -> None:
    """A captured step fixes the numbers alone; one replay has no prompts."""
    rows, tokens, width = 8, 1600, 300
    table = torch.zeros(rows, width, dtype=torch.int32, device=GPU)
    contexts = torch.zeros(rows, dtype=torch.int32, device=GPU)
    starts = torch.zeros(rows + 1, dtype=torch.int32, device=GPU)
    lens = PROMPTS["chunks"], PROMPTS["short ones"], ([1, 1], [70, 900]), PROMPTS["after decodes"]
    steps = [Step(*each, 16, 8, dtype=BF16, cache_dtype=cache_dtype, width=128, device=GPU) for each in lens]
    cache = atom_ops.make_kv_layer(max(len(step.cache.kv) for step in steps), 16, 8, 128, cache_dtype, GPU)
    q = torch.zeros(tokens, 16, 128, dtype=BF16, device=GPU)

    def run() -> torch.Tensor:
        plan = AttentionPlan(table, contexts, starts, tokens, 1, tokens, width * 16)
        return atom_ops.paged_attention(q, cache, plan, steps[0].rule)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for step in (*steps, steps[0]):
        count, used = len(step.q), len(step.table)
        q[:count], q[count:] = step.q, torch.nan
        cache.kv[: len(step.cache.kv)] = step.cache.kv
        if cache.scale is not None and step.cache.scale is not None:
            cache.scale[: len(step.cache.kv)] = step.cache.scale
        table[:used, : step.table.shape[1]] = torch.from_numpy(step.table)
        contexts.zero_()[:used] = torch.from_numpy(step.context_lens)
        starts.fill_(count)[: used + 1] = step.plan().query_starts_R1
        graph.replay()
        torch.testing.assert_close(out[:count], by_other_kernels(step), atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("name", ["among others", "chunks"])
def test_prompts_follow_the_definition(name: str) -> None:
    check(Step(*PROMPTS[name], 4, 2, dtype=BF16, cache_dtype=BF16, width=128, device=GPU), TOLERANCE[BF16])


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (100, True)])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_prompts_of_a_float8_cache(dtype: torch.dtype, window: int, sinks: bool, block_size: int) -> None:
    check_prompts(Step(*PROMPTS["among others"], 8, 2, block_size, FP8, dtype, 128, GPU, window, sinks))


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("room", [1 << 28, 1200, 0])
@pytest.mark.parametrize("heads", [(16, 8, 128), (40, 8, 128), (64, 8, 64), (9, 3, 64)])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_a_float8_cache_with_other_heads(
    name: str, heads: tuple[int, int, int], room: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for all contexts to be gathered, for 1,200 tokens of them, and for none."""
    from atom_ops.triton_impl.attention import gathered_contexts

    slot_bytes = 4 * heads[1] * heads[2]
    monkeypatch.setattr(gathered_contexts, "MOST_BYTES", room if room > 1200 else room * slot_bytes)
    check_prompts(Step(*PROMPTS[name], *heads[:2], dtype=BF16, cache_dtype=FP8, width=heads[2], device=GPU,
                       window=window))  # fmt: skip


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("room", [1 << 28, 1200])
@pytest.mark.parametrize("heads", [(16, 8, 128), (64, 8, 64)])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_whose_contexts_are_copied(
    name: str, heads: tuple[int, int, int], room: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of rows with 100 queries, or as many as 1,200 tokens hold."""
    from atom_ops.triton_impl.attention import gathered_contexts

    slot_bytes = 4 * heads[1] * heads[2]
    monkeypatch.setattr(gathered_contexts, "FEWEST_COPIED", 100)
    monkeypatch.setattr(gathered_contexts, "LEAST_COPIED_BYTES", 1)
    monkeypatch.setattr(gathered_contexts, "MOST_BYTES", room if room > 1200 else room * slot_bytes)
    check_prompts(Step(*PROMPTS[name], *heads[:2], dtype=BF16, cache_dtype=BF16, width=heads[2], device=GPU,
                       window=window))  # fmt: skip


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("window", [0, 100])
def test_prompts_ignore_what_a_float8_cache_holds_after_them(window: int) -> None:
    """Codes and scales of tokens that no query sees are NaN."""
    step = Step(*PROMPTS["among others"], 8, 2, 16, FP8, BF16, 128, GPU, window)
    expected = step.run()
    assert step.cache.scale is not None
    seen = torch.zeros(step.cache.kv.shape[:2], dtype=torch.bool)
    for row, context in enumerate(step.context_lens.tolist()):
        first = max(0, context - step.query_lens[row] - window + 1) if window else 0
        place = np.arange(first, context)
        seen[step.table[row][place // 16], place % 16] = True
    step.cache.kv.view(torch.uint8)[~seen.to(GPU)] = 0x7F
    step.cache.scale[~seen.to(GPU)] = torch.nan
    assert torch.equal(step.run(), expected)


@pytest.mark.usefixtures("prompt_kernel")
@pytest.mark.parametrize("cache_dtype", [BF16, FP8])
def test_prompts_do_not_depend_on_their_step(cache_dtype: torch.dtype) -> None:
    """And repeat bit for bit, whatever the timing of the warps and the program that computes a tile."""
    together = Step([900, 1500, 640], [900, 1500, 640], 16, 8, dtype=BF16, cache_dtype=cache_dtype, width=128,
                    device=GPU)  # fmt: skip
    first = together.run()
    assert all(torch.equal(together.run(), first) for _ in range(20))
    lens, table = together.query_lens[1:2], together.table[1:2]
    plan = atom_ops.plan_attention(lens, lens, table, GPU)
    alone = atom_ops.paged_attention(together.q[900:2400], together.cache, plan, together.rule)
    assert torch.equal(alone, first[900:2400])
