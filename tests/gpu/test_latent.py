"""Latent attention on a GPU: against the definition, captured, and bit by bit."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import atom_ops
from atom_ops import AttentionPlan, backend
from atom_ops.op import REGISTRY
from atom_ops.ops.attention.kv_cache import FP8
from atom_ops.ops.linear.linear import BATCH_INVARIANT
from tests.helpers.kernels.latent_step import CPU, LatentStep, exchanged, parts
from tests.helpers.kernels.paged_step import STEPS

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, BF16: 3e-2}
DEEPSEEK = (512, 64)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    backend.resolve(GPU, ["triton"])
    yield
    backend.resolve(CPU)


def check(step: LatentStep, error: float) -> None:
    found = step.run()
    assert found.dtype == step.dtype
    torch.testing.assert_close(found.double().cpu(), step.expected(), atol=error, rtol=error)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
def test_follows_the_definition(
    query_lens: list[int], context_lens: list[int], heads: int, dtype: torch.dtype
) -> None:
    check(LatentStep(query_lens, context_lens, heads, DEEPSEEK, dtype=dtype, device=GPU), TOLERANCE[dtype])


@pytest.mark.parametrize(("heads", "widths"), [(1, (64, 16)), (3, (40, 8)), (20, (128, 32)), (80, DEEPSEEK)])
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_heads_widths_and_blocks(heads: int, widths: tuple[int, int], block_size: int) -> None:
    step = LatentStep([1, 150, 1, 3], [800, 150, 5, 9], heads, widths, block_size, BF16, device=GPU)
    check(step, TOLERANCE[BF16])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_float8_cache(dtype: torch.dtype, heads: int) -> None:
    """Against the reference in float32, which reads the same rounded values."""
    step = LatentStep([1, 20, 1], [700, 300, 5], heads, DEEPSEEK, dtype=dtype, cache_dtype=FP8, device=GPU)
    assert step.cache.scale is not None
    cache = replace(step.cache, rows=step.cache.rows.cpu(), scale=step.cache.scale.cpu())
    plan = atom_ops.plan_attention(step.query_lens, step.context_lens, step.table, CPU)
    wanted = atom_ops.latent_attention.reference(step.q.float().cpu(), cache, plan, step.scale)
    torch.testing.assert_close(step.run().float().cpu(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
def test_parts_of_ranks_merge(
    query_lens: list[int], context_lens: list[int], ranks: int, dtype: torch.dtype
) -> None:
    """Ranks that split the tokens, one after another; 16 heads on each."""
    heads, blocks = 16 * ranks, 16 * ranks
    step = LatentStep(query_lens, context_lens, heads, DEEPSEEK, blocks, dtype, device=GPU)
    merged = exchanged(parts(step, ranks), dtype).double().cpu()
    torch.testing.assert_close(merged, step.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [16, 128])
def test_one_graph_runs_any_smaller_batch(heads: int) -> None:
    """Fewer rows than captured: padding rows have no context and result in zeros."""
    rows, width = 8, 200
    table = torch.zeros(rows, width, dtype=torch.int32, device=GPU)
    contexts = torch.zeros(rows, dtype=torch.int32, device=GPU)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=GPU)
    plan = AttentionPlan(table, contexts, starts, rows, 1, 1, width * 16)
    steps = [
        LatentStep([1] * len(lens), lens, heads, DEEPSEEK, dtype=BF16, device=GPU)
        for lens in ([1, 40, 700], [3, 2000, 17, 16, 1, 900, 64, 65])
    ]
    blocks = max(len(step.cache.rows) for step in steps)
    cache = atom_ops.make_latent_layer(blocks, 16, *DEEPSEEK, BF16, GPU)
    q = torch.zeros(rows, heads, sum(DEEPSEEK), dtype=BF16, device=GPU)
    scale = steps[0].scale
    atom_ops.latent_attention(q, cache, plan, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = atom_ops.latent_attention(q, cache, plan, scale)
    for step in (*steps, steps[0]):
        count = len(step.q)
        q[:count], q[count:] = step.q, torch.nan
        cache.rows[: len(step.cache.rows)] = step.cache.rows
        table[:count, : step.table.shape[1]] = torch.from_numpy(step.table)
        contexts.zero_()[:count] = torch.from_numpy(step.context_lens)
        graph.replay()
        torch.testing.assert_close(out[:count].double().cpu(), step.expected(), atol=3e-2, rtol=3e-2)
        assert not out[count:].any()


@pytest.mark.parametrize("heads", [16, 128])
def test_bits_depend_on_neither_batch_nor_phase(heads: int) -> None:
    """The last token of a prompt: as part of it, as a decode alone, as one of a batch."""
    lens = [1500, 900, 300, 70]
    step = LatentStep(lens, lens, heads, DEEPSEEK, dtype=BF16, device=GPU)
    whole = step.run(split_tokens=512)
    ends = (torch.tensor(lens).cumsum(0) - 1).to(GPU)
    for rows in ([0, 1, 2, 3], [0], [1], [2], [3], [3, 1]):
        decodes = LatentStep([1] * len(rows), [lens[row] for row in rows], heads, DEEPSEEK, dtype=BF16)
        decodes.device, decodes.cache, decodes.table = GPU, step.cache, step.table[rows]
        decodes.q = step.q[ends[rows]]
        assert torch.equal(decodes.run(split_tokens=512), whole[ends[rows]])


@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
def test_head_gemms_do_not_depend_on_the_batch(tokens: int) -> None:
    """Each token has the same bits alone and in a batch."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, 16, 192, generator=generator).to(BF16).to(GPU)
    expansion = (torch.randn(16, 256, 512, generator=generator) / 16).to(BF16).to(GPU)
    angles = torch.rand(tokens, 1, 32, generator=generator) * 6.3
    cos, sin = (turn.to(GPU) for turn in atom_ops.rotation(angles.cos(), angles.sin(), True))
    absorb, expand = (REGISTRY[op].providers[BATCH_INVARIANT] for op in ("absorb_queries", "expand_values"))
    together = absorb.function(q, expansion[:, :128], cos, sin, True)
    values = expand.function(together[..., :512], expansion[:, 128:])
    for token in (0, tokens // 2, tokens - 1):
        one = slice(token, token + 1)
        alone = absorb.function(q[one], expansion[:, :128], cos[one], sin[one], True)
        assert torch.equal(alone, together[one])
        assert torch.equal(expand.function(alone[..., :512], expansion[:, 128:]), values[one])


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_negative_slots_store_nothing(dtype: torch.dtype) -> None:
    cache = atom_ops.make_latent_layer(4, 4, *DEEPSEEK, dtype, GPU)
    latents = torch.randn(3, sum(DEEPSEEK), device=GPU)
    turn = atom_ops.rotation(torch.ones(3, 1, 32, device=GPU), torch.zeros(3, 1, 32, device=GPU), True)
    slots = torch.tensor([-1, 5, -1], device=GPU)
    atom_ops.write_latent(latents, torch.ones(512, device=GPU), 1e-6, *turn, cache, slots, True)
    written = cache.rows.float().flatten(0, 1).abs().sum(1) > 0
    assert written.nonzero().flatten().tolist() == [5]
