"""QKV projection to attention output in one op."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.attention.attention import AttentionRule, paged_attention, plan_attention
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.kv_cache import KVLayer, make_kv_layer
from atom_ops.ops.attention.qkv import HeadNorms, rotate_and_write_kv
from atom_ops.ops.attention.rotary import rotation
from atom_ops.tolerances import REDUCTION


def _case(
    query_lens: list[int],
    context_lens: list[int],
    heads: tuple[int, int],
    width: int,
    with_norms: bool,
    window: int = 0,
    soft_cap: float = 0.0,
    chunked: bool = False,
) -> Case:
    """`heads` are query heads and key/value heads; a case with a window also has sinks."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        tokens = sum(query_lens)
        block_size = 16
        per_row = -(-max(context_lens) // 16)
        table = torch.randperm(len(context_lens) * per_row + 3, generator=generator)
        table = table[: len(context_lens) * per_row].view(-1, per_row)
        cpu = torch.device("cpu")
        cache = make_kv_layer(len(context_lens) * per_row + 3, block_size, heads[1], width, dtype, cpu)
        cache.kv.copy_(torch.randn(cache.kv.shape, generator=generator))
        angles = torch.rand(tokens, 1, width // 2, generator=generator) * 6.3
        slots = [
            int(table[row, at // block_size]) * block_size + at % block_size
            for row, (length, context) in enumerate(zip(query_lens, context_lens, strict=True))
            for at in range(context - length, context)
        ]
        features = (heads[0] + 2 * heads[1]) * width
        qkv = torch.randn(tokens, features + 32, generator=generator).to(dtype)[:, 16:-16]
        weights = torch.rand(2, width, generator=generator).to(dtype)
        lens = np.array([query_lens, context_lens], np.int32)
        plan = plan_attention(lens[0], lens[1], table.numpy().astype(np.int32), cpu)
        norms = HeadNorms(weights[0], weights[1], 1e-6) if with_norms else None
        rotated = rotation(angles.cos(), angles.sin())
        sinks_H = torch.randn(heads[0], generator=generator).to(dtype) if window else None
        rule = AttentionRule(width**-0.5, window, sinks_H, soft_cap, chunked)
        return qkv, *rotated, cache, torch.tensor(slots), norms, plan, rule

    more = f"{'-norms' if with_norms else ''}{f'-window{window}-sinks' if window else ''}"
    more += f"{f'-cap{soft_cap:g}' if soft_cap else ''}{'-chunks' if chunked else ''}"
    label = f"{heads[0]}/{heads[1]}x{width}-{query_lens}of{context_lens}{more}"
    return Case(label.replace(" ", ""), make)


@op(
    [
        _case([1, 1, 1], [1, 40, 700], (9, 3), 32, False),
        _case([1, 1], [129, 16], (16, 8), 128, True),
        _case([1], [64], (4, 1), 80, True),
        _case([1, 5], [33, 12], (4, 2), 32, True),
        _case([1, 1, 1], [1, 40, 700], (16, 2), 64, False, window=128),
        _case([1, 1, 1], [1, 40, 700], (4, 2), 32, False, soft_cap=1.5),
        _case([1, 1, 1, 1], [1, 97, 96, 700], (4, 2), 32, True, window=96, chunked=True),
    ],
    REDUCTION,
    composed=True,
)
def attend_projection(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: KVLayer,
    slots_T: Tensor,
    norms: HeadNorms | None,
    plan: AttentionPlan,
    rule: AttentionRule,
) -> Tensor:
    """`rotate_and_write_kv`, then `paged_attention` of the queries it returns, [T, H, E]."""
    q_THE = rotate_and_write_kv(qkv_TO, cos_T1R, sin_T1R, cache, slots_T, norms)
    return paged_attention(q_THE, cache, plan, rule)
