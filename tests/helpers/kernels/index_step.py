"""Random steps of sparse attention over latents, and their expected results."""

from dataclasses import replace

import torch
from torch import Tensor

import atom_ops
from atom_ops import IndexKeys, TopKIndices
from atom_ops.ops.attention.kv_cache import FP8, float8_codes
from tests.helpers.kernels.latent_step import CPU, LatentStep


class IndexStep(LatentStep):
    """A step of latent attention, with an index key for each cache row and NaN elsewhere."""

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        index_heads: int = 8,
        width: int = 32,
        cache_dtype: torch.dtype | None = None,
        dtype: torch.dtype = torch.float32,
        whole_numbers: bool = False,
        device: torch.device = CPU,
        heads: int = 4,
        widths: tuple[int, int] = (32, 16),
    ) -> None:
        """`whole_numbers`: few distinct scores, so many ties. Other arguments: see `LatentStep`."""
        super().__init__(
            query_lens, context_lens, heads, widths, dtype=dtype, cache_dtype=cache_dtype, device=device
        )
        generator = torch.Generator().manual_seed(sum(query_lens))
        tokens, kept_as = len(self.q), cache_dtype or dtype
        index_q = torch.randn(tokens, index_heads, width, generator=generator)
        weights = torch.randn(tokens, index_heads, generator=generator)
        keys = torch.randn(len(self.slots), width, generator=generator)
        if whole_numbers:
            index_q, weights, keys = index_q.round(), weights.sign(), keys.round()
        self.index_q, self.weights = index_q.to(dtype).to(device), weights.to(device)
        cache = atom_ops.make_index_keys(*self.cache.rows.shape[:2], width, kept_as, CPU)
        if kept_as == FP8:
            assert cache.scale is not None
            codes, scale = float8_codes(keys)
            cache.keys.view(torch.uint8).flatten(0, 1)[self.slots] = codes
            cache.scale.flatten()[self.slots] = scale
            keys = codes.view(FP8).float() * scale[:, None]
        else:
            keys = keys.to(kept_as)
            cache.keys.fill_(torch.nan)
            cache.keys.flatten(0, 1)[self.slots] = keys
        self.index = IndexKeys(cache.keys.to(device), None if cache.scale is None else cache.scale.to(device))
        self.keys = keys.double().split(context_lens)

    def choose(self, count: int, split_tokens: int = 0) -> TopKIndices:
        return atom_ops.index_topk(self.index_q, self.weights, self.index, self.plan(split_tokens), count)

    def topk(self, count: int) -> list[list[int]]:
        """The expected top-k positions of each token."""
        found, first = [], 0
        for keys, queries in zip(self.keys, self.query_lens.tolist(), strict=True):
            for token in range(queries):
                seen = keys[: len(keys) - queries + token + 1]
                products = (self.index_q[first + token].double().cpu() @ seen.T).relu()
                scores = self.weights[first + token].double().cpu() @ products
                order = sorted(range(len(seen)), key=lambda s: (-float(scores[s]), s))
                found.append(sorted(order[:count]))
            first += queries
        return found

    def slots_of(self, topk: list[list[int]], count: int) -> Tensor:
        """The slots of these tokens, as `index_topk` returns them."""
        rows = self.slots.split(self.context_lens.tolist())
        owner = [row for row, queries in enumerate(self.query_lens.tolist()) for _ in range(queries)]
        slots = torch.full((len(topk), count), -1, dtype=torch.int32)
        for token, positions in enumerate(topk):
            slots[token, : len(positions)] = rows[owner[token]][positions].int()
        return slots

    def attend(self, topk: TopKIndices) -> Tensor:
        return atom_ops.sparse_latent_attention(self.q, self.cache, topk, self.scale)

    def attended(self, topk: list[list[int]]) -> Tensor:
        """Token by token: weights from whole cache rows, values from their first features."""
        owner = [row for row, queries in enumerate(self.query_lens.tolist()) for _ in range(queries)]
        out = []
        for token, positions in enumerate(topk):
            rows = self.rows[owner[token]][positions]
            weights = (self.q[token].double().cpu() @ rows.T * self.scale).softmax(-1)
            out.append(weights @ rows[:, : self.latent])
        return torch.stack(out)


def with_spare_tokens(step: IndexStep, spare: int) -> atom_ops.AttentionPlan:
    """The step's plan as in a captured graph, with padding rows and padding tokens."""
    plan = step.plan()
    rows = torch.zeros(2, dtype=torch.int32, device=step.device)
    table = plan.block_table_RW.new_full((2, plan.block_table_RW.shape[1]), 10**6)
    return replace(
        plan,
        block_table_RW=torch.cat((plan.block_table_RW, table)),
        context_lens_R=torch.cat((plan.context_lens_R, rows)),
        query_starts_R1=torch.cat((plan.query_starts_R1, plan.query_starts_R1[-1] + rows)),
        num_tokens=plan.num_tokens + spare,
        max_context_len=plan.max_context_len + 20,
        host=None,
    )
