"""Random steps of paged attention, and their expected results."""

import numpy as np
import torch
from torch import Tensor

import atom_ops
from atom_ops.ops.attention import attention_plan
from atom_ops.ops.attention.kv_cache import FP8

CPU = torch.device("cpu")

STEPS = {
    "one decode": ([1], [1]),
    "decodes": ([1] * 5, [1, 16, 17, 600, 2000]),
    "equal decodes": ([1] * 4, [32] * 4),
    "fresh prompt": ([50], [50]),
    "long prompt": ([400], [400]),
    "chunk of a prompt": ([64], [500]),
    "prompts": ([3, 130, 16, 2], [3, 130, 40, 900]),
    "mixed": ([1, 40, 1, 1, 7, 1], [300, 40, 1, 900, 600, 65]),
}


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
        width: int = 32,
        device: torch.device = CPU,
        window: int = 0,
        sinks: bool = False,
        soft_cap: float = 0.0,
        chunked: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(len(query_lens) * 1000 + sum(context_lens))
        self.heads, self.kv_heads, self.dtype = heads, kv_heads, dtype
        sinks_H = (2 * torch.randn(heads, generator=generator)).to(dtype).to(device) if sinks else None
        self.rule = atom_ops.AttentionRule(0.2, window, sinks_H, soft_cap, chunked)
        self.device = device
        self.block_size = block_size
        self.query_lens = np.array(query_lens, np.int32)
        self.context_lens = np.array(context_lens, np.int32)
        needed = [-(-length // block_size) for length in context_lens]
        blocks = torch.randperm(sum(needed) + 5, generator=generator).numpy()
        # Poison what no query sees, after a row's context and before its window: block table
        # entries and memory.
        self.table = np.full((len(needed), max(needed) + 2), 10**6, np.int32)
        self.cache = atom_ops.make_kv_layer(sum(needed) + 5, block_size, kv_heads, width, cache_dtype, CPU)
        if cache_dtype != FP8:
            self.cache.kv.fill_(torch.nan)
        self.rows: list[tuple[Tensor, Tensor]] = []
        used = 0
        for row, (count, length) in enumerate(zip(needed, context_lens, strict=True)):
            seen = self._first_seen(length - query_lens[row])
            live = slice(seen // block_size, count)
            self.table[row, live] = blocks[used : used + count][live]
            used += count
            k, v = torch.randn(2, length, kv_heads, width, generator=generator).to(dtype)
            position = np.arange(seen, length)
            slots = self.table[row][position // block_size] * block_size + position % block_size
            atom_ops.write_kv.reference(
                k[seen:], v[seen:], self.cache, torch.from_numpy(slots.astype(np.int64))
            )
            self.rows.append((k, v))
        self.q = torch.randn(sum(query_lens), heads, width, generator=generator).to(dtype).to(device)
        scale = self.cache.scale
        self.cache = atom_ops.KVLayer(self.cache.kv.to(device), None if scale is None else scale.to(device))

    def plan(self) -> atom_ops.AttentionPlan:
        return atom_ops.plan_attention(self.query_lens, self.context_lens, self.table, self.device)

    def work(self) -> tuple[attention_plan.WorkItems, ...]:
        return self.plan().work_items(
            self.heads, self.kv_heads, self.block_size, self.dtype, self.rule.window,
            chunked=self.rule.chunked,
        )  # fmt: skip

    def run(self) -> Tensor:
        return atom_ops.paged_attention(self.q, self.cache, self.plan(), self.rule)

    def expected(self) -> Tensor:
        out, first = [], 0
        for (k, v), count in zip(self.rows, self.query_lens.tolist(), strict=True):
            group = self.heads // self.kv_heads
            keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
            q = self.q[first : first + count].double().cpu()
            scores = torch.einsum("qhe,khe->hqk", q, keys) * self.rule.scale
            if cap := self.rule.soft_cap:
                scores = cap * torch.tanh(scores / cap)
            hidden = torch.ones(count, len(k)).triu(len(k) - count + 1).bool()
            for query in range(count):
                hidden[query, : self._first_seen(len(k) - count + query)] = True
            weights = self._softmax(scores.masked_fill(hidden, -torch.inf))
            out.append(torch.einsum("hqk,khe->qhe", weights, values))
            first += count
        return torch.cat(out)

    def _first_seen(self, position: int) -> int:
        """The first token that the query at `position` sees."""
        if not self.rule.window:
            return 0
        if self.rule.chunked:
            return position - position % self.rule.window
        return max(position - self.rule.window + 1, 0)

    def _softmax(self, scores_HQC: Tensor) -> Tensor:
        """Sinks are appended to a row's scores, and dropped after the softmax."""
        if self.rule.sinks_H is None:
            return scores_HQC.softmax(-1)
        sinks_HQ1 = self.rule.sinks_H.double().cpu()[:, None, None].expand(*scores_HQC.shape[:2], 1)
        return torch.cat([scores_HQC, sinks_HQ1], -1).softmax(-1)[..., :-1]
