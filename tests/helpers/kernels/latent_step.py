"""Random steps of latent attention, and their expected results."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import atom_ops
from atom_ops import LatentLayer, TokenShard
from atom_ops.ops.attention.kv_cache import FP8

CPU = torch.device("cpu")
_STALE = 1e4


class LatentStep:
    """Rows with contexts of any length, written to the cache by `write_latent`.

    What no query sees is poisoned: table entries after a context, and memory that no row owns.
    """

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        heads: int = 4,
        widths: tuple[int, int] = (32, 16),
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        device: torch.device = CPU,
    ) -> None:
        """`widths` are the latent's and the rotated key's."""
        generator = torch.Generator().manual_seed(len(query_lens) * 1000 + sum(context_lens))
        latent, rope = widths
        self.heads, self.dtype, self.device = heads, dtype, device
        # Scores differ clearly, and rounded rows change none of them much.
        self.scale = 1.4 * (latent + rope) ** -0.5
        self.query_lens = np.array(query_lens, np.int32)
        self.context_lens = np.array(context_lens, np.int32)
        needed = [-(-length // block_size) for length in context_lens]
        blocks = torch.randperm(sum(needed) + 5, generator=generator).numpy()
        self.table = np.full((len(needed), max(needed) + 2), 10**6, np.int32)
        kept_as = cache_dtype or dtype
        cache = atom_ops.make_latent_layer(sum(needed) + 5, block_size, latent, rope, kept_as, CPU)
        if kept_as != FP8:
            cache.rows.fill_(torch.nan)
        slots, used = [], 0
        for row, (count, length) in enumerate(zip(needed, context_lens, strict=True)):
            self.table[row, :count] = blocks[used : used + count]
            used += count
            position = np.arange(length)
            slots.append(self.table[row][position // block_size] * block_size + position % block_size)
        self.slots = torch.from_numpy(np.concatenate(slots).astype(np.int64))
        raw = torch.randn(sum(context_lens), latent + rope, generator=generator).to(dtype)
        angles = torch.rand(len(raw), 1, rope // 2, generator=generator) * 6.3
        turn = atom_ops.rotation(angles.cos(), angles.sin(), interleaved=True)
        weight = (0.5 + torch.rand(latent, generator=generator)).to(dtype)
        atom_ops.write_latent.reference(raw, weight, 1e-6, *turn, cache, self.slots, True)
        normed = raw[:, :latent].double()
        normed = normed * (normed.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        even, odd = raw[:, latent::2].double(), raw[:, latent + 1 :: 2].double()
        cos, sin = angles[:, 0].cos().double(), angles[:, 0].sin().double()
        key = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(1)
        self.rows = torch.cat((normed, key), 1).split(context_lens)
        self.latent = latent
        self.q = torch.randn(sum(query_lens), heads, latent + rope, generator=generator).to(dtype).to(device)
        scale = None if cache.scale is None else cache.scale.to(device)
        self.cache: LatentLayer = replace(cache, rows=cache.rows.to(device), scale=scale)

    def plan(self, split_tokens: int = 0) -> atom_ops.AttentionPlan:
        lens = self.query_lens, self.context_lens
        return atom_ops.plan_attention(*lens, self.table, self.device, split_tokens)

    def run(self, split_tokens: int = 0) -> Tensor:
        return atom_ops.latent_attention(self.q, self.cache, self.plan(split_tokens), self.scale)

    def expected(self) -> Tensor:
        """Row by row: weights from whole cache rows, values from their first features."""
        out, first = [], 0
        for rows, count in zip(self.rows, self.query_lens.tolist(), strict=True):
            q = self.q[first : first + count].double().cpu()
            scores = torch.einsum("qhk,ck->hqc", q, rows) * self.scale
            hidden = torch.ones(count, len(rows)).triu(len(rows) - count + 1).bool()
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqc,cl->qhl", weights, rows[:, : self.latent]))
            first += count
        return torch.cat(out)


def sharded(step: LatentStep, shard: TokenShard) -> LatentLayer:
    """The rank's cache of the step; `step` has blocks for all ranks. Everything else in it is stale."""
    blocks, size, width = step.cache.rows.shape
    rows = step.cache.rows.new_full((blocks, size // shard.ranks, width), _STALE)
    own_T = shard.own_slots(step.slots)
    stored, own = own_T[own_T >= 0].to(step.device), step.slots[own_T >= 0].to(step.device)
    rows.flatten(0, 1)[stored] = step.cache.rows.flatten(0, 1)[own]
    return replace(step.cache, rows=rows, shard=shard)


def parts(step: LatentStep, ranks: int, split_tokens: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(out, lse) of every rank."""
    caches = [sharded(step, TokenShard(rank, ranks)) for rank in range(ranks)]
    plan = step.plan(split_tokens)
    return [atom_ops.partial_latent_attention(step.q, cache, plan, step.scale) for cache in caches]


def exchanged(found: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """Attention of all heads, merged by the ranks that own them."""
    ranks = len(found)
    sent = [atom_ops.pack_partials(out.to(dtype), lse, ranks) for out, lse in found]
    received = [torch.stack([message[rank] for message in sent]) for rank in range(ranks)]
    return torch.cat([atom_ops.merge_partials(*atom_ops.unpack_partials(each)) for each in received], 1)
