"""Sparse attention against the definition: index keys, top-k, attention to the top-k tokens."""

import pytest
import torch

import atom_ops
from atom_ops import IndexNorm, TopKIndices, backend
from atom_ops.ops.attention.kv_cache import FP8
from atom_ops.ops.latent import sparse_attention
from atom_ops.ops.latent.index_keys import read_index_keys
from atom_ops.triton_impl.hardware import target
from tests.helpers.kernels.index_step import IndexStep, with_spare_tokens
from tests.helpers.kernels.latent_step import CPU

STEPS = {
    "decodes": ([1] * 4, [1, 16, 17, 300]),
    "fresh prompt": ([24], [24]),
    "chunk of a prompt": ([10], [120]),
    "mixed": ([1, 19, 1, 3], [130, 19, 1, 65]),
}
COUNT = 16


@pytest.fixture(params=["torch", *(["triton"] if target.INTERPRETED else [])], autouse=True)
def provider(request: pytest.FixtureRequest) -> str:
    backend.resolve(CPU, [request.param])
    return str(request.param)


@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("whole_numbers", [False, True])
def test_top_k_with_ties_to_earlier_tokens(
    query_lens: list[int], context_lens: list[int], whole_numbers: bool
) -> None:
    step = IndexStep(query_lens, context_lens, whole_numbers=whole_numbers)
    wanted = step.topk(COUNT)
    found = step.choose(COUNT)
    assert found.slots_TJ.dtype == found.counts_T.dtype == torch.int32
    assert found.counts_T.tolist() == [len(positions) for positions in wanted]
    assert torch.equal(found.slots_TJ, step.slots_of(wanted, COUNT))


@pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("whole_numbers", [False, True])
def test_segments_of_a_context_give_the_same_top_k(
    monkeypatch: pytest.MonkeyPatch, provider: str, whole_numbers: bool
) -> None:
    if provider != "triton":
        pytest.skip("only Triton cuts contexts")
    from atom_ops.triton_impl.latent import sparse_attention as kernels

    monkeypatch.setattr(kernels, "_SEGMENT", 40)
    monkeypatch.setattr(kernels, "_SCORES", 16)
    step = IndexStep([1, 2, 1], [150, 45, 9], whole_numbers=whole_numbers)
    for count in (1, 16, 100):
        found, wanted = step.choose(count), step.topk(count)
        assert torch.equal(found.slots_TJ, step.slots_of(wanted, count))
        assert found.counts_T.tolist() == [len(positions) for positions in wanted]


@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
def test_attention_reads_only_the_top_k(query_lens: list[int], context_lens: list[int]) -> None:
    step = IndexStep(query_lens, context_lens)
    found = step.attend(step.choose(COUNT)).double()
    torch.testing.assert_close(found, step.attended(step.topk(COUNT)), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 33, 299])
def test_any_number_of_tokens(count: int) -> None:
    step = IndexStep([1, 3, 5], [300, 34, 5])
    assert torch.equal(step.choose(count).slots_TJ, step.slots_of(step.topk(count), count))


@pytest.mark.parametrize(("heads", "width"), [(1, 16), (3, 24), (32, 64)])
def test_heads_and_widths(heads: int, width: int) -> None:
    step = IndexStep([1, 5], [90, 40], heads, width)
    assert torch.equal(step.choose(COUNT).slots_TJ, step.slots_of(step.topk(COUNT), COUNT))


def test_short_contexts_are_read_whole() -> None:
    step = IndexStep([1, 9, 3], [64, 9, 40])
    torch.testing.assert_close(step.attend(step.choose(64)), step.run(), atol=5e-6, rtol=1e-5)


def test_float8() -> None:
    step = IndexStep([1, 6], [200, 60], cache_dtype=FP8)
    assert torch.equal(step.choose(COUNT).slots_TJ, step.slots_of(step.topk(COUNT), COUNT))
    difference = (step.attend(step.choose(COUNT)).double() - step.attended(step.topk(COUNT))).abs()
    assert 1e-3 < difference.max() < 0.3


def test_padding_rows_and_tokens_have_no_top_k() -> None:
    step, padding = IndexStep([1, 1, 5], [40, 3, 60]), 3
    plan = with_spare_tokens(step, padding)
    pad = [torch.cat((x, x[:padding])) for x in (step.index_q, step.weights, step.q)]
    found = atom_ops.index_topk(pad[0], pad[1], step.index, plan, COUNT)
    assert torch.equal(found.slots_TJ[:-padding], step.slots_of(step.topk(COUNT), COUNT))
    assert found.slots_TJ[-padding:].eq(-1).all() and found.counts_T[-padding:].eq(0).all()
    out = atom_ops.sparse_latent_attention(pad[2], step.cache, found, step.scale)
    assert torch.equal(out[-padding:], torch.zeros_like(out[-padding:]))
    torch.testing.assert_close(out[:-padding].double(), step.attended(step.topk(COUNT)), atol=5e-6, rtol=1e-5)


def test_chunks_give_the_same_result(monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    step = IndexStep([11, 1], [90, 50])
    whole = step.choose(COUNT), step.attend(step.choose(COUNT))
    if provider == "triton":
        from atom_ops.triton_impl.latent import sparse_attention as kernels

        monkeypatch.setattr(kernels, "_WORKSPACE", 700)
    else:
        monkeypatch.setattr(sparse_attention, "_AT_ONCE", 20000)
    assert torch.equal(step.choose(COUNT).slots_TJ, whole[0].slots_TJ)
    torch.testing.assert_close(step.attend(whole[0]), whole[1])


@pytest.mark.skipif(not target.INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_a_row_does_not_depend_on_others(provider: str) -> None:
    if provider != "triton":
        pytest.skip("batch invariance needs kernels")
    lens = [200, 40, 90]
    together = IndexStep([1, 1, 1], lens)
    topk = together.choose(COUNT, split_tokens=512)
    out = together.attend(topk)
    assert topk.split_tokens == 512
    for row in range(3):
        one = TopKIndices(topk.slots_TJ[row : row + 1], topk.counts_T[row : row + 1], 512)
        q = together.q[row : row + 1]
        alone = atom_ops.sparse_latent_attention(q, together.cache, one, together.scale)
        assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8])
def test_written_keys(interleaved: bool, cache_dtype: torch.dtype, provider: str) -> None:
    if (provider, cache_dtype) == ("triton", FP8):
        pytest.skip("the interpreter loses carries rounding to float8")
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(9, 24, generator=generator) + 2
    norm = IndexNorm(*torch.randn(2, 24, generator=generator), 1e-6)
    angles = torch.rand(9, 1, 4, generator=generator) * 6.3
    turn = atom_ops.rotation(angles.cos(), angles.sin(), interleaved)
    slots = torch.randperm(16, generator=generator)[:9]
    cache = atom_ops.make_index_keys(4, 4, 24, cache_dtype, CPU)
    atom_ops.write_index_keys(x, norm, *turn, cache, slots, interleaved)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred * (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = expected * norm.weight_I.double() + norm.bias_I.double()
    pairs = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    first, second = (expected[:, pair].clone() for pair in pairs)
    cos, sin = angles[:, 0].cos().double(), angles[:, 0].sin().double()
    expected[:, pairs[0]], expected[:, pairs[1]] = first * cos - second * sin, second * cos + first * sin
    error = 1e-5 if cache_dtype != FP8 else 0.07
    found = read_index_keys(cache, slots).double()
    torch.testing.assert_close(found, expected, atol=error * 4, rtol=error)
