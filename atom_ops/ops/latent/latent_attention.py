"""Multi-head latent attention (MLA): keys and values of all heads come from one latent per token.

    key of head h     [W_UK[h] latent | rotated key, the same for all heads]
    value of head h    W_UV[h] latent

There are two equivalent forms. Expanded: keys and values of every head are computed and attention
is ordinary MHA (`prompt_attention`), best for whole prompts. Absorbed: W_UK is applied to the
queries (`absorb_queries`) and W_UV after the sum over tokens (`expand_values`); attention is then
MQA over the cached latents (`latent_attention`), and nothing is computed for cached tokens.

T tokens, H heads, N features of a query or key without RoPE, R with RoPE, E = N + R, V features of
a value, C of the latent, K = C + R.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from atom_ops.op import Case, op
from atom_ops.ops.attention.attention import (
    AttentionRule,
    attend_items,
    in_step_order,
    item_attention,
    without_padding,
)
from atom_ops.ops.attention.attention_plan import AttentionPlan, WorkItems, plan_attention
from atom_ops.ops.attention.kv_cache import FP8
from atom_ops.ops.attention.rotary import rotary, rotation
from atom_ops.ops.latent.latent_cache import (
    LatentLayer,
    make_latent_layer,
    read_latent,
    with_shared_scale,
    write_latent,
)
from atom_ops.ops.sampling.token_shard import ALL_TOKENS, TokenShard
from atom_ops.tolerances import REDUCTION

_CPU = torch.device("cpu")
_HEAD = 128
"""Features that plans count as one head when they bound gathered memory."""


def _absorb_case(tokens: int, heads: int, widths: tuple[int, int, int], interleaved: bool = True) -> Case:
    """`widths` are N, R and C."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor | bool, ...]:
        nope, rope, latent = widths
        q = torch.randn(tokens, heads, nope + rope, generator=generator).to(dtype)
        expansion = torch.randn(heads, nope + 16, latent, generator=generator) / nope**0.5
        angles = torch.rand(tokens, 1, rope // 2, generator=generator) * 6.3
        cos_sin = rotation(angles.cos(), angles.sin(), interleaved)
        return q, expansion.to(dtype)[:, :nope], *cos_sin, interleaved

    return Case(f"{tokens}x{heads}x{'+'.join(map(str, widths))}{'' if interleaved else '-halves'}", make)


@op(
    [
        _absorb_case(1, 16, (128, 64, 512)),
        _absorb_case(19, 3, (128, 64, 512)),
        _absorb_case(70, 5, (24, 16, 40)),
        _absorb_case(4, 2, (192, 64, 512), interleaved=False),
    ],
    REDUCTION,
)
def absorb_queries(
    q_THE: Tensor, key_HNC: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool = False
) -> Tensor:
    """Absorbed queries, [T, H, C + R]: each head's first N features times its W_UK, and the other R
    features with RoPE (see `rotary`).

    Only the last dimension of `q_THE` and `key_HNC` must be contiguous.
    """
    nope = key_HNC.shape[1]
    latent_HTC = torch.bmm(q_THE[..., :nope].transpose(0, 1), key_HNC)
    rotated_THR = rotary.reference(q_THE[..., nope:], cos_T1R, sin_T1R, interleaved)
    return torch.cat((latent_HTC.transpose(0, 1), rotated_THR), -1)


def _expand_case(tokens: int, heads: int, latent: int, value: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        latents = torch.randn(tokens, heads, latent, generator=generator).to(dtype)
        expansion = torch.randn(heads, value + 16, latent, generator=generator) / latent**0.5
        return latents, expansion.to(dtype)[:, 16:]

    return Case(f"{tokens}x{heads}x{latent}-{value}", make)


@op(
    [_expand_case(1, 16, 512, 128), _expand_case(19, 3, 512, 128), _expand_case(70, 5, 40, 24)],
    REDUCTION,
)
def expand_values(latent_THC: Tensor, value_HVC: Tensor) -> Tensor:
    """Each head's weighted sum of latents times its W_UV, [T, H, V].

    Only the last dimension of both must be contiguous.
    """
    return torch.bmm(latent_THC.transpose(0, 1), value_HVC.mT).transpose(0, 1).contiguous()


def _plan(query_lens: list[int], context_lens: list[int], table: Tensor) -> AttentionPlan:
    lens = np.array([query_lens, context_lens], np.int32)
    return plan_attention(lens[0], lens[1], table.numpy().astype(np.int32), _CPU)


def latent_case(
    query_lens: list[int],
    context_lens: list[int],
    heads: int,
    widths: tuple[int, int] = (512, 64),
    fp8: bool = False,
    decode_query_len: int = 1,
    shard: TokenShard = ALL_TOKENS,
    shared_scale: bool = False,
) -> Case:
    """A step of attention to the tokens of `shard`; `widths` are C and R, `shared_scale` is of float8."""

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, LatentLayer, AttentionPlan, float]:
        block_size = 16
        latent, rope = widths
        per_row = -(-max(context_lens) // (block_size * shard.ranks))
        blocks = torch.randperm(len(context_lens) * per_row + 3, generator=generator)
        table = blocks[: len(context_lens) * per_row].view(-1, per_row)
        cache = make_latent_layer(len(blocks), block_size, latent, rope, FP8 if fp8 else dtype, _CPU, shard)
        cache = with_shared_scale(cache) if shared_scale else cache
        rows = torch.randn(len(blocks) * block_size * shard.ranks, latent + rope, generator=generator).to(
            dtype
        )
        still = rotation(torch.ones(len(rows), 1, rope // 2), torch.zeros(len(rows), 1, rope // 2))
        weight = torch.ones(latent, dtype=dtype)
        write_latent.reference(rows, weight, 1e-6, *still, cache, torch.arange(len(rows)))
        q = torch.randn(sum(query_lens), heads, latent + rope, generator=generator).to(dtype)
        plan = replace(_plan(query_lens, context_lens, table), decode_query_len=decode_query_len)
        return q, cache, plan, (latent + rope) ** -0.5

    label = f"{heads}x{widths[0]}+{widths[1]}-{query_lens}of{context_lens}{'-fp8' if fp8 else ''}"
    label += f"-decodes{decode_query_len}" if decode_query_len > 1 else ""
    label += "-shared-scale" if shared_scale else ""
    label += f"-rank{shard.rank}of{shard.ranks}" if shard.ranks > 1 else ""
    return Case(label.replace(" ", ""), make)


@op(
    [
        latent_case([1, 1, 1], [1, 40, 700], 16),
        latent_case([1, 1], [130, 65], 5, (40, 8)),
        latent_case([37], [37], 3, (64, 16)),
        latent_case([1, 20, 1, 5], [33, 300, 2, 5], 8, (128, 32)),
        latent_case([1, 3], [200, 90], 72, (64, 16)),
        latent_case([1, 9], [64, 30], 16, (64, 16), fp8=True),
        latent_case([3, 3, 3], [3, 40, 700], 5, (40, 8), decode_query_len=3),
        latent_case([5, 30, 2, 5], [300, 30, 90, 5], 72, (64, 16), decode_query_len=5),
    ],
    REDUCTION,
)
def latent_attention(q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float) -> Tensor:
    """Absorbed attention: each head's weighted sum of the latents that a new token sees, [T, H, C].

    The weights are softmax(scale * q kᵀ), where k is a whole row of the cache. Rows of the step may
    have any number of new tokens.
    """
    rule = AttentionRule(scale)

    def attend(items: WorkItems) -> Tensor:
        # A value is the first C features of its key; the sum's other features are dropped.
        rows_N1CK = _rows_of(items, cache, q_THK)
        return attend_items(q_THK, rows_N1CK, rows_N1CK, items, rule)

    groups = _work_items(plan, q_THK, cache)
    return in_step_order(groups, attend, q_THK)[..., : cache.latent_width].contiguous()


@op(
    [
        latent_case([1, 1, 1], [1, 40, 700], 16, shard=TokenShard(1, 2)),
        latent_case([37], [37], 3, (64, 16), shard=TokenShard(0, 3)),
        latent_case([1, 20, 1, 5], [33, 300, 2, 5], 8, (128, 32), shard=TokenShard(2, 4)),
        latent_case([1, 9], [64, 30], 16, (64, 16), fp8=True, shard=TokenShard(1, 2)),
        latent_case([3, 3, 3], [3, 40, 700], 72, (40, 8), decode_query_len=3, shard=TokenShard(7, 8)),
    ],
    REDUCTION,
)
def partial_latent_attention(
    q_THK: Tensor, cache: LatentLayer, plan: AttentionPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """`latent_attention` to the tokens on this rank alone, and its log-sum-exp [T, H], float32.

    A query that sees none of them has 0 and -inf. Padding tokens have undefined results.
    """
    latent = cache.latent_width

    def attend(items: WorkItems) -> Tensor:
        rows_N1CK = _rows_of(items, cache, q_THK)
        out, lse = item_attention(q_THK, rows_N1CK, rows_N1CK, items, scale)
        return without_padding(torch.cat((out[..., :latent].float(), lse[..., None]), -1), items)

    groups = _work_items(plan, q_THK, cache)
    shape = q_THK.new_empty(*q_THK.shape[:2], latent + 1, dtype=torch.float32)
    out_THC, lse_TH1 = in_step_order(groups, attend, shape).split([latent, 1], -1)
    sees_none_TH1 = lse_TH1 < torch.finfo(q_THK.dtype).min / 4  # the masks are half of it
    out_THC = out_THC.masked_fill(sees_none_TH1, 0).to(q_THK.dtype)
    return out_THC, lse_TH1.masked_fill(sees_none_TH1, -torch.inf).squeeze(-1)


def _work_items(plan: AttentionPlan, q_THK: Tensor, cache: LatentLayer) -> tuple[WorkItems, ...]:
    heads, width = q_THK.shape[1:]
    worth = -(-width // _HEAD)
    return plan.work_items(heads * worth, worth, cache.rows.shape[1], q_THK.dtype, shard=cache.shard)


def _rows_of(items: WorkItems, cache: LatentLayer, q_THK: Tensor) -> Tensor:
    """The cache rows of the items' chunks, [N, 1, C, K]."""
    count, _, _, chunk = items.mask_N1LC.shape
    return read_latent(cache, items.slots, q_THK.dtype).view(count, 1, chunk, q_THK.shape[2])


def _prompt_case(lens: list[int], heads: int, width: int, value_width: int) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, AttentionPlan, float]:
        q, k = torch.randn(2, sum(lens), heads, width, generator=generator).to(dtype)
        both = torch.randn(sum(lens), heads, 8 + value_width, generator=generator).to(dtype)
        no_table = torch.zeros(len(lens), 0)
        return q, k, both[..., 8:], _plan(lens, lens, no_table), width**-0.5

    return Case(f"{heads}x{width}+{value_width}-{lens}".replace(" ", ""), make)


@op(
    [
        _prompt_case([1], 2, 192, 128),
        _prompt_case([5, 130, 1, 33], 3, 192, 128),
        _prompt_case([70, 2], 2, 24, 16),
        _prompt_case([90], 1, 16, 24),
    ],
    REDUCTION,
)
def prompt_attention(
    q_THE: Tensor, k_THE: Tensor, v_THV: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """Causal attention of whole prompts to their own keys and values, [T, H, V].

    For steps with `plan.whole_prompts`: reads no cache. Only the last dimension of q, k and v must
    be contiguous.
    """
    heads = k_THE.shape[1]
    width = max(k_THE.shape[2], v_THV.shape[2])
    # torch's fastest CPU attention needs keys and values of one width.
    q, k, v = (functional.pad(x, (0, width - x.shape[2])) for x in (q_THE, k_THE, v_THV))
    rule = AttentionRule(scale)

    def attend(items: WorkItems) -> Tensor:
        count, _, _, chunk = items.mask_N1LC.shape
        k_NHCE, v_NHCE = (
            x.index_select(0, items.slots).view(count, chunk, heads, width).transpose(1, 2) for x in (k, v)
        )
        return attend_items(q, k_NHCE, v_NHCE, items, rule)

    groups = plan.prompt_items(heads, q_THE.dtype)
    return in_step_order(groups, attend, q)[..., : v_THV.shape[2]].contiguous()
