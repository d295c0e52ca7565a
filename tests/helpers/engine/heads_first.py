"""An attention backend with a layout of its own: keys and values apart, heads before tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops import AttentionBackend, AttentionConfig, AttentionPlan, AttentionRule, HeadNorms, rotated_heads


@dataclass(frozen=True)
class Cache:
    """[K, num_blocks * block_size, E] each; the last slot is for padding."""

    keys: Tensor
    values: Tensor
    block_size: int


@dataclass(frozen=True)
class Row:
    """A row's tokens of the step, its context and its blocks."""

    tokens: slice
    context: int
    blocks: Tensor


class HeadsFirst(AttentionBackend):
    """Runs layers without a sliding window on a CPU, one row at a time; its plan needs no host rows."""

    name = "heads_first"
    needs = "a CPU"

    def __init__(self) -> None:
        self.planned = 0

    def supported(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def supports(self, config: AttentionConfig) -> bool:
        return config.kv_dtype == config.dtype and not config.window and not config.soft_cap

    def bytes_per_block(self, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * block_size * kv_heads * head_dim * dtype.itemsize

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Cache:
        keys, values = torch.zeros(
            2, kv_heads, num_blocks * block_size + 1, head_dim, dtype=dtype, device=device
        )
        return Cache(keys, values, block_size)

    def plan(self, plan: AttentionPlan) -> list[Row]:
        self.planned += 1
        starts, contexts = plan.query_starts_R1.tolist(), plan.context_lens_R.tolist()
        tokens = map(slice, starts[:-1], starts[1:])
        rows = zip(tokens, contexts, plan.block_table_RW, strict=True)
        return [Row(*row) for row in rows if row[0].stop > row[0].start and row[1]]

    def attend(
        self,
        qkv_TO: Tensor,
        cos_T1R: Tensor,
        sin_T1R: Tensor,
        cache: Cache,
        slots_T: Tensor,
        norms: HeadNorms | None,
        plan: list[Row],
        rule: AttentionRule,
    ) -> Tensor:
        kv_heads, _, head_dim = cache.keys.shape
        q_THE, k_TKE, v_TKE = rotated_heads(qkv_TO, cos_T1R, sin_T1R, kv_heads, head_dim, norms)
        cache.keys[:, slots_T] = k_TKE.transpose(0, 1)
        cache.values[:, slots_T] = v_TKE.transpose(0, 1)
        out_THE = torch.zeros_like(q_THE)
        for row in plan:
            out_THE[row.tokens] = _attend(q_THE[row.tokens], cache, row, rule)
        return out_THE


def _attend(q_LHE: Tensor, cache: Cache, row: Row, rule: AttentionRule) -> Tensor:
    at_C = torch.arange(row.context)
    slots_C = row.blocks[at_C // cache.block_size].long() * cache.block_size + at_C % cache.block_size
    group = q_LHE.shape[1] // len(cache.keys)
    k_HCE, v_HCE = (x[:, slots_C].repeat_interleave(group, 0) for x in (cache.keys, cache.values))
    scores_HLC = q_LHE.transpose(0, 1) @ k_HCE.mT * rule.scale
    own_L = at_C[row.context - len(q_LHE) :]
    scores_HLC = scores_HLC.masked_fill(at_C > own_L[:, None], -torch.inf)
    if rule.sinks_H is not None:
        sinks_HL1 = rule.sinks_H[:, None, None].expand(-1, len(q_LHE), 1)
        scores_HLC = torch.cat((scores_HLC, sinks_HL1), 2)
    weights_HLC = scores_HLC.softmax(-1)[..., : row.context]
    return (weights_HLC @ v_HCE).transpose(0, 1)
