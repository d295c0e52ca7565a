"""Sparse attention on a GPU: against the definition, captured, and bit by bit."""

from collections.abc import Iterator

import pytest
import torch

import atom_ops
from atom_ops import TopKIndices, backend
from atom_ops.ops.attention.kv_cache import FP8
from tests.helpers.kernels.index_step import IndexStep, with_spare_tokens
from tests.helpers.kernels.latent_step import CPU

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, BF16: 3e-2}
DEEPSEEK = (512, 64)
STEPS = {
    "decodes": ([1] * 5, [1, 64, 65, 3000, 9000]),
    "fresh prompt": ([300], [300]),
    "chunk of a prompt": ([64], [5000]),
    "mixed": ([1, 140, 1, 7], [1300, 140, 1, 2500]),
}
COUNT = 64

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    backend.resolve(GPU, ["triton"])
    yield
    backend.resolve(CPU)


def step_of(
    query_lens: list[int],
    context_lens: list[int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    heads: int = 16,
) -> IndexStep:
    """Scores are integers, so every device selects the same tokens."""
    return IndexStep(
        query_lens, context_lens, 64, 128, cache_dtype, dtype, whole_numbers=True, device=GPU,
        heads=heads, widths=DEEPSEEK,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
def test_follows_the_definition(query_lens: list[int], context_lens: list[int], dtype: torch.dtype) -> None:
    step = step_of(query_lens, context_lens, dtype)
    wanted = step.topk(COUNT)
    found = step.choose(COUNT)
    assert torch.equal(found.slots_TJ.cpu(), step.slots_of(wanted, COUNT))
    error = TOLERANCE[dtype]
    attended = step.attend(found).double().cpu()
    torch.testing.assert_close(attended, step.attended(wanted), atol=error, rtol=error)


@pytest.mark.parametrize("heads", [8, 128])
def test_2048_of_many(heads: int) -> None:
    step = step_of([1, 3], [20000, 2100], BF16, heads=heads)
    wanted = step.topk(2048)
    found = step.choose(2048)
    assert torch.equal(found.slots_TJ.cpu(), step.slots_of(wanted, 2048))
    attended = step.attend(found).double().cpu()
    torch.testing.assert_close(attended, step.attended(wanted), atol=3e-2, rtol=3e-2)


def test_short_contexts_are_read_whole() -> None:
    step = step_of([1, 200, 3], [512, 200, 40], BF16)
    torch.testing.assert_close(step.attend(step.choose(512)), step.run(), atol=3e-2, rtol=3e-2)


def test_float8() -> None:
    """Scores round differently on the two devices, so nearly all selected tokens are equal."""
    step = step_of([1, 20], [3000, 300], BF16, FP8)
    wanted = [set(row) for row in step.slots_of(step.topk(COUNT), COUNT).tolist()]
    found = [set(row) for row in step.choose(COUNT).slots_TJ.tolist()]
    shared = sum(len(one & two) for one, two in zip(wanted, found, strict=True))
    assert shared > 0.97 * COUNT * len(wanted)


def test_captured_with_padding_rows() -> None:
    """Captured for longer contexts and more rows than there are."""
    step, padding = step_of([1] * 6, [40, 3, 3000, 700, 65, 1], BF16), 2
    plan = with_spare_tokens(step, padding)
    index_q, weights, q = (torch.cat((x, x[:padding])) for x in (step.index_q, step.weights, step.q))

    def run() -> tuple[TopKIndices, torch.Tensor]:
        topk = atom_ops.index_topk(index_q, weights, step.index, plan, COUNT)
        return topk, atom_ops.sparse_latent_attention(q, step.cache, topk, step.scale)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk, out = run()
    topk.slots_TJ.zero_()
    graph.replay()
    torch.cuda.synchronize()
    wanted = step.topk(COUNT)
    assert torch.equal(topk.slots_TJ[:-padding].cpu(), step.slots_of(wanted, COUNT))
    assert topk.slots_TJ[-padding:].eq(-1).all() and topk.counts_T[-padding:].eq(0).all()
    attended = out[:-padding].double().cpu()
    torch.testing.assert_close(attended, step.attended(wanted), atol=3e-2, rtol=3e-2)
    assert out[-padding:].eq(0).all()


def test_attention_waits_for_the_selection_before_it() -> None:
    """Steps queued without a pause: their selections take turns in the same memory."""
    steps = [step_of([1] * 6, [start + 500 * row for row in range(6)], BF16) for start in (40, 3000)]
    expected = []
    for step in steps:
        topk = step.choose(COUNT)
        torch.cuda.synchronize()
        expected.append(step.attend(topk))
    torch.cuda.synchronize()
    results = [(index % 2, steps[index % 2].attend(steps[index % 2].choose(COUNT))) for index in range(400)]
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[which]) for which, out in results)


def test_more_than_65535_tokens() -> None:
    """A grid's second and third dimensions hold fewer programs than a step may have tokens."""
    tokens, heads = 66_000, 4
    step = step_of([1], [COUNT], BF16, heads=heads)
    topk = step.choose(COUNT)
    many = TopKIndices(
        topk.slots_TJ.expand(tokens, -1).contiguous(), topk.counts_T.expand(tokens).contiguous()
    )
    out = atom_ops.sparse_latent_attention(step.q.expand(tokens, -1, -1), step.cache, many, step.scale)
    assert torch.equal(out[-1], out[0])
    torch.testing.assert_close(out[:1], step.attend(topk), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_does_not_depend_on_others(dtype: torch.dtype) -> None:
    lens = [3000, 40, 900, 5000]
    step = IndexStep([1] * 4, lens, 64, 128, None, dtype, device=GPU, heads=16, widths=DEEPSEEK)
    together = step.choose(COUNT, split_tokens=512)
    out = step.attend(together)
    for row in range(len(lens)):
        one = slice(row, row + 1)
        topk = TopKIndices(together.slots_TJ[one], together.counts_T[one], 512)
        alone = atom_ops.sparse_latent_attention(step.q[one], step.cache, topk, step.scale)
        assert torch.equal(alone[0], out[row])
