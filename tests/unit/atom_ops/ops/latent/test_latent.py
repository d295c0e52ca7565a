"""Latent attention against the definition: written rows, absorbed attention, whole prompts, both forms."""

import pytest
import torch

import atom_ops
from atom_ops import backend
from atom_ops.ops.attention.kv_cache import FP8
from atom_ops.triton_impl.hardware import target
from tests.helpers.kernels.latent_step import CPU, LatentStep
from tests.helpers.kernels.paged_step import STEPS


@pytest.fixture(params=["sdpa_cpu", "torch", *(["triton"] if target.INTERPRETED else [])], autouse=True)
def provider(request: pytest.FixtureRequest) -> str:
    backend.resolve(CPU, [request.param])
    return str(request.param)


@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS.values(), ids=STEPS)
def test_follows_the_definition(query_lens: list[int], context_lens: list[int]) -> None:
    step = LatentStep(query_lens, context_lens)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "widths"), [(1, (24, 8)), (16, (32, 16)), (20, (40, 8)), (70, (16, 16))])
def test_heads_and_widths(heads: int, widths: tuple[int, int]) -> None:
    step = LatentStep([1, 20, 1, 2], [80, 20, 5, 40], heads, widths)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_block_sizes(block_size: int) -> None:
    step = LatentStep([1, 20, 1], [300, 70, 5], block_size=block_size)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(("cache_dtype", "error"), [(torch.bfloat16, 0.02), (FP8, 0.2)])
def test_float8_cache(cache_dtype: torch.dtype, error: float) -> None:
    step = LatentStep([1, 20, 1], [700, 300, 5], cache_dtype=cache_dtype)
    difference = (step.run().double() - step.expected()).abs()
    assert difference.max() < error
    assert difference.max() > error / 100, "nothing was rounded: the cache is not that narrow"


@pytest.mark.parametrize("interleaved", [True, False])
def test_written_rows(interleaved: bool, provider: str) -> None:
    """Alone and with the queries' latent, read back."""
    generator = torch.Generator().manual_seed(1)
    latents = 3 * torch.randn(9, 20 + 32 + 8, generator=generator)
    angles = torch.rand(9, 1, 4, generator=generator) * 6.3
    turn = atom_ops.rotation(angles.cos(), angles.sin(), interleaved)
    q_weight, weight = torch.rand(20, generator=generator), torch.rand(32, generator=generator)
    slots = torch.randperm(16, generator=generator)[:9]
    # Triton's interpreter loses carries rounding to float8.
    for dtype, error in ((torch.float32, 1e-5), *([] if provider == "triton" else [(FP8, 0.07)])):
        caches = [atom_ops.make_latent_layer(4, 4, 32, 8, dtype, CPU) for _ in range(2)]
        atom_ops.write_latent(latents[:, 20:], weight, 1e-6, *turn, caches[0], slots, interleaved)
        norms = atom_ops.LatentNorms(q_weight, weight, 1e-6)
        q = atom_ops.norm_and_write_latents(latents, norms, *turn, caches[1], slots, interleaved)
        torch.testing.assert_close(q, atom_ops.rms_norm(latents[:, :20], q_weight, 1e-6))
        expected = torch.cat(
            (
                atom_ops.rms_norm(latents[:, 20:52], weight, 1e-6),
                atom_ops.rotary(latents[:, None, 52:], *turn, interleaved)[:, 0],
            ),
            1,
        )
        for cache in caches:
            found = atom_ops.read_latent(cache, slots, torch.float32)
            torch.testing.assert_close(found, expected, atol=error * 4, rtol=error)


@pytest.mark.parametrize("lens", [[1], [300], [3, 130, 1, 40]], ids=str)
def test_both_forms_agree(lens: list[int]) -> None:
    """The step's own rows, expanded to every head's keys and values, and absorbed by its queries."""
    heads, nope, rope, latent, value = 3, 12, 16, 32, 20
    step = LatentStep(lens, lens, heads, (latent, rope))
    generator = torch.Generator().manual_seed(7)
    expansion = torch.randn(heads, nope + value, latent, generator=generator) / latent**0.5
    tokens = len(step.q)
    q = torch.randn(tokens, heads, nope + rope, generator=generator)
    still = atom_ops.rotation(torch.ones(tokens, 1, rope // 2), torch.zeros(tokens, 1, rope // 2))
    plan = step.plan()
    assert plan.whole_prompts
    absorbed = atom_ops.absorb_queries(q, expansion[:, :nope], *still, True)
    found = atom_ops.latent_attention(absorbed, step.cache, plan, 0.2)
    found = atom_ops.expand_values(found, expansion[:, nope:])
    rows = atom_ops.read_latent(step.cache, step.slots, torch.float32)
    kv = torch.einsum("tc,hxc->thx", rows[:, :latent], expansion)
    k = torch.cat((kv[..., :nope], rows[:, None, latent:].expand(-1, heads, -1)), 2)
    expanded = atom_ops.prompt_attention(q, k, kv[..., nope:], plan, 0.2)
    torch.testing.assert_close(found, expanded, atol=1e-5, rtol=1e-5)


def test_a_later_chunk_is_not_a_whole_prompt() -> None:
    assert not LatentStep([5, 7], [5, 8]).plan().whole_prompts


def test_batch_invariant_decodes_match_prefills(provider: str) -> None:
    """To the last bit on a GPU; in numpy's matmul a row's bits depend on its index."""
    if provider != "triton":
        pytest.skip("batch invariance needs kernels")
    lens = [700, 40, 300]
    step = LatentStep(lens, lens, 8)
    whole = step.run(split_tokens=512)
    decodes = LatentStep([1, 1, 1], lens, 8)
    ends = torch.tensor(lens).cumsum(0) - 1
    decodes.cache, decodes.table, decodes.q = step.cache, step.table, step.q[ends]
    torch.testing.assert_close(decodes.run(split_tokens=512), whole[ends], atol=1e-6, rtol=0)
