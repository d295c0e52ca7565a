"""Latent attention split over ranks by tokens: what each rank stores, its part, and the merged parts."""

import pytest
import torch

import atom_ops
from atom_ops import TokenShard, backend
from atom_ops.ops.attention.kv_cache import FP8
from atom_ops.triton_impl.hardware import target
from tests.helpers.kernels.latent_step import CPU, LatentStep, exchanged, parts
from tests.helpers.kernels.paged_step import STEPS


@pytest.fixture(params=["sdpa_cpu", *(["triton"] if target.INTERPRETED else [])], autouse=True)
def provider(request: pytest.FixtureRequest) -> str:
    backend.resolve(CPU, [request.param])
    return str(request.param)


SMALL = {"short": ([1, 1, 4, 1], [1, 2, 5, 17]), "splits": ([1, 1, 9], [600, 3, 40])}
STEPS_HERE = SMALL if target.INTERPRETED else SMALL | STEPS
"""The others are too slow in the interpreter."""


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS_HERE.values(), ids=STEPS_HERE)
def test_merged_parts_are_attention_to_all_tokens(
    query_lens: list[int], context_lens: list[int], ranks: int
) -> None:
    step = LatentStep(query_lens, context_lens, heads=ranks, block_size=4 * ranks)
    merged = exchanged(parts(step, ranks), torch.float32)
    torch.testing.assert_close(merged.double(), step.expected(), atol=5e-6, rtol=1e-5)


def test_a_part_has_the_log_sum_exp_of_its_tokens() -> None:
    """A rank without any has 0 and -inf: of 2 tokens, ranks 2 and 3 have none."""
    step = LatentStep([1, 5], [2, 30], heads=3, block_size=8)
    for rank, (out, lse) in enumerate(parts(step, 4)):
        first = 0
        for rows, count in zip(step.rows, step.query_lens.tolist(), strict=True):
            q = step.q[first : first + count].double()
            scores_THC = torch.einsum("thk,ck->thc", q, rows) * step.scale
            hidden = torch.ones(count, len(rows)).triu(len(rows) - count + 1).bool()
            scores_THC = scores_THC.masked_fill(hidden[:, None], -torch.inf)[..., rank::4]
            found = lse[first : first + count].double()
            torch.testing.assert_close(found, scores_THC.logsumexp(-1), atol=1e-5, rtol=1e-6)
            first += count
        if rank >= 2:
            assert bool((lse[0] == -torch.inf).all()) and bool((out[0] == 0).all())


def test_parts_in_16_bits_and_fixed_splits() -> None:
    step = LatentStep([1, 10, 3], [300, 30, 3], heads=2, block_size=16)
    found = exchanged(parts(step, 2, split_tokens=512), torch.bfloat16)
    torch.testing.assert_close(found.double(), step.expected(), atol=0.02, rtol=0.01)


def test_no_token_anywhere_is_0() -> None:
    lse = torch.full((4, 1, 2), -torch.inf)
    assert torch.equal(atom_ops.merge_partials(torch.zeros(4, 1, 2, 6), lse), torch.zeros(1, 2, 6))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_each_token_has_one_slot_on_one_rank(ranks: int) -> None:
    slots = torch.randperm(40 * ranks)[:33]
    position = slots % (8 * ranks)
    found = [TokenShard(rank, ranks).own_slots(slots) for rank in range(ranks)]
    owner = torch.stack(found).argmax(0)
    assert torch.equal(owner, position % ranks)
    assert all(int((each >= 0).sum()) == int((owner == rank).sum()) for rank, each in enumerate(found))
    for rank in range(ranks):
        own = found[rank][owner == rank]
        assert len(own.unique()) == len(own) and int(own.max()) < 40
        shard = TokenShard(rank, ranks)
        assert [shard.count(n) for n in range(30)] == [len(range(rank, n, ranks)) for n in range(30)]
        assert [shard.position(index) for index in range(9)] == list(range(rank, 9 * ranks, ranks))
        assert TokenShard(rank, ranks).own_slots(torch.tensor([-1])).tolist() == [-1]


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_ranks_store_what_one_rank_would(dtype: torch.dtype, provider: str) -> None:
    """By `write_latent`, and from the rows of a step; padding and tokens of other ranks change nothing."""
    if provider == "triton" and dtype == FP8:
        pytest.skip("the interpreter loses carries rounding to float8")
    generator = torch.Generator().manual_seed(3)
    ranks, blocks, tokens = 3, 5, 17
    latents, weight = torch.randn(tokens, 24, generator=generator), torch.rand(16, generator=generator)
    angles = torch.rand(tokens, 1, 4, generator=generator) * 6.3
    turn = atom_ops.rotation(angles.cos(), angles.sin(), True)
    slots = torch.randperm(blocks * 4 * ranks, generator=generator)[:tokens]
    slots[[3, 16]] = -1
    whole = atom_ops.make_latent_layer(blocks, 4 * ranks, 16, 8, dtype, CPU)
    atom_ops.write_latent(latents, weight, 1e-6, *turn, whole, slots, True)
    wanted = atom_ops.read_latent(whole, torch.arange(blocks * 4 * ranks), torch.float32)
    for rank in range(ranks):
        made = [
            atom_ops.make_latent_layer(blocks, 4, 16, 8, dtype, CPU, TokenShard(rank, ranks))
            for _ in range(2)
        ]
        atom_ops.write_latent(latents, weight, 1e-6, *turn, made[0], slots, True)
        step = atom_ops.latents_of_step(made[1], tokens)
        atom_ops.write_latent(latents, weight, 1e-6, *turn, step, torch.arange(tokens), True)
        atom_ops.keep_latents(step, made[1], slots)
        for cache in made:
            found = atom_ops.read_latent(cache, torch.arange(blocks * 4), torch.float32)
            torch.testing.assert_close(found, wanted[rank::ranks], atol=0, rtol=0)
