"""Sparse attention over latents: an indexer scores the context, attention reads the top-k tokens.

    score of token s for token t    Σ over heads g:  weight[t, g] * relu(q[t, g] · key[s])

The top-k tokens are cache slots in the order of their positions: a block table with blocks of one
token. Layers that share a block table can share them.

T tokens, G indexer heads, I features of an index key, J top-k tokens, S context tokens,
H attention heads, C features of the latent, K = C + R of a cache row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.attention.attention_plan import AttentionPlan, plan_attention
from atom_ops.ops.attention.kv_cache import FP8, float8_codes
from atom_ops.ops.attention.rotary import rotation
from atom_ops.ops.latent.index_keys import IndexKeys, make_index_keys, read_index_keys
from atom_ops.ops.latent.latent_cache import LatentLayer, make_latent_layer, read_latent, write_latent
from atom_ops.tolerances import EXACT, REDUCTION

_CPU = torch.device("cpu")
# Elements that one chunk may gather or compute: 64 MiB of float32.
_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class TopKIndices:
    """The top-k tokens that each token of a step attends to."""

    slots_TJ: Tensor
    """int32: cache slots in the order of positions; -1 after the last."""
    counts_T: Tensor
    """int32: number of slots."""
    split_tokens: int = 0
    """`AttentionPlan.split_tokens` of the step's plan."""


def _topk_case(
    query_lens: list[int],
    context_lens: list[int],
    count: int,
    heads: int = 8,
    width: int = 32,
    kind: str = "",
    rate: int = 1,
) -> Case:
    """`kind` "ties": scores are small integers, many of them equal. A block has 16 keys."""

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, IndexKeys, AttentionPlan, int, int]:
        plan, num_blocks = _plan(query_lens, context_lens, generator)
        q = torch.randn(sum(query_lens), heads, width, generator=generator)
        weights = torch.randn(sum(query_lens), heads, generator=generator)
        rows = torch.randn(num_blocks, 16, width, generator=generator)
        if kind == "ties":
            q, weights, rows = q.round(), weights.sign(), rows.round()
        if kind == "fp8":
            codes, scale = float8_codes(rows)
            keys = IndexKeys(codes.view(FP8), scale)
        else:
            keys = make_index_keys(num_blocks, 16, width, dtype, _CPU)
            keys.keys.copy_(rows)
        return q.to(dtype), weights, keys, plan, count, rate

    label = f"{heads}x{width}-{query_lens}of{context_lens}-{count}{'-' if kind else ''}{kind}"
    label += f"-rate{rate}" if rate > 1 else ""
    return Case(label.replace(" ", ""), make)


def _plan(
    query_lens: list[int], context_lens: list[int], generator: torch.Generator
) -> tuple[AttentionPlan, int]:
    """A plan with randomly placed blocks, and the number of blocks."""
    lens = np.array([query_lens, context_lens], np.int32)
    per_row = -(-max(context_lens) // 16)
    blocks = torch.randperm(len(context_lens) * per_row + 3, generator=generator)
    table = blocks[: len(context_lens) * per_row].view(-1, per_row).int().numpy()
    return plan_attention(lens[0], lens[1], table, _CPU), len(blocks)


@op(
    [
        _topk_case([1, 1, 1], [1, 17, 300], 16),
        _topk_case([37, 1, 5], [90, 64, 5], 32, 3, 24),
        _topk_case([3, 20], [600, 33], 64, 64, 128),
        _topk_case([8], [40], 64),
        _topk_case([1, 9], [333, 100], 20, kind="ties"),
        _topk_case([1, 4], [90, 64], 16, 32, 128, kind="fp8"),
        _topk_case([1, 40, 2], [333, 100, 3], 8, 3, 24, rate=4),
    ],
    EXACT,
)
def index_topk(
    q_TGI: Tensor, weights_TG: Tensor, keys: IndexKeys, plan: AttentionPlan, count: int, rate: int = 1
) -> TopKIndices:
    """For each new token the `count` tokens of its context with the highest scores, or all of them.

    Ties go to earlier tokens. Scores are computed in float32; weights are float32, of either sign. With a
    `rate` a key stands for so many tokens, of which a block has a multiple: it is seen from the last one on.
    """
    tokens = len(q_TGI)
    heads, width = q_TGI.shape[1:]
    seen_by_most = plan.max_context_len // rate
    row_T, position_T = token_positions(plan, tokens)
    last_T = (position_T + 1) // rate - 1
    position_S = torch.arange(seen_by_most, device=q_TGI.device)
    slots_TJ = torch.full((tokens, count), -1, dtype=torch.int32, device=q_TGI.device)
    counts_T = (last_T + 1).clamp_(max=count).int()
    block_size = keys.keys.shape[1]
    for chunk in in_chunks(tokens, seen_by_most * max(heads, width)):
        seen_TS = position_S <= last_T[chunk, None]
        block_TS = plan.block_table_RW[row_T[chunk]][:, position_S // block_size].long()
        slot_TS = (block_TS * block_size + position_S % block_size).masked_fill_(~seen_TS, 0)
        key_TSI = read_index_keys(keys, slot_TS.flatten()).view(*slot_TS.shape, width)
        dot_TGS = torch.bmm(q_TGI[chunk].float(), key_TSI.mT).relu_()
        score_TS = torch.bmm(weights_TG[chunk, None], dot_TGS).squeeze(1)
        selected_TS = _highest(score_TS.masked_fill_(~seen_TS, -torch.inf), count) & seen_TS
        # Tokens that are not selected go to an extra column, which is dropped.
        place_TS = torch.where(selected_TS, selected_TS.cumsum(1) - 1, count)
        wide_TJ = slots_TJ.new_full((len(place_TS), count + 1), -1)
        slots_TJ[chunk] = wide_TJ.scatter_(1, place_TS, slot_TS.int())[:, :count]
    return TopKIndices(slots_TJ, counts_T, plan.split_tokens)


def token_positions(plan: AttentionPlan, tokens: int) -> tuple[Tensor, Tensor]:
    """The row of each token of the step (int64), and its position in the row; -1 for padding."""
    token_T = torch.arange(tokens, device=plan.query_starts_R1.device)
    ends_R = plan.query_starts_R1[1:].long()
    row_T = torch.searchsorted(ends_R, token_T, right=True)
    padding_T = row_T == len(ends_R)
    row_T = row_T.clamp_(max=len(ends_R) - 1)
    last_T = plan.context_lens_R[row_T] - ends_R[row_T] + token_T
    return row_T, last_T.masked_fill_(padding_T, -1).clamp_(min=-1)


def _highest(score_TS: Tensor, count: int) -> Tensor:
    """Mask of the `count` highest scores of each row; all of them if there are no more."""
    if score_TS.shape[1] <= count:
        return torch.ones_like(score_TS, dtype=torch.bool)
    least_T1 = score_TS.topk(count, 1, sorted=True).values[:, -1:]
    above_TS = score_TS > least_T1
    equal_TS = score_TS == least_T1
    left_T1 = count - above_TS.sum(1, keepdim=True)
    return above_TS | (equal_TS & (equal_TS.cumsum(1) <= left_T1))


def in_chunks(tokens: int, cost: int) -> Iterator[slice]:
    """The tokens in chunks; one token costs `cost` elements."""
    step = max(_AT_ONCE // max(cost, 1), 1)
    return (slice(start, start + step) for start in range(0, tokens, step))


def _sparse_case(
    counts: list[int], most: int, heads: int, widths: tuple[int, int], fp8: bool = False
) -> Case:
    """`counts` top-k tokens for each token, at most `most`; `widths` are C and R."""

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, LatentLayer, TopKIndices, float]:
        latent, rope = widths
        blocks = 40
        width = latent + rope
        cache = make_latent_layer(blocks, 16, latent, rope, FP8 if fp8 else dtype, _CPU)
        rows = torch.randn(blocks * 16, width, generator=generator).to(dtype)
        still = rotation(torch.ones(len(rows), 1, rope // 2), torch.zeros(len(rows), 1, rope // 2))
        weight = torch.ones(latent, dtype=dtype)
        write_latent.reference(rows, weight, 1e-6, *still, cache, torch.arange(len(rows)))
        topk = [torch.randperm(len(rows), generator=generator)[:most].int() for _ in counts]
        slots = torch.stack(topk)
        counts_T = torch.tensor(counts, dtype=torch.int32)
        slots[torch.arange(most) >= counts_T[:, None]] = -1
        q = torch.randn(len(counts), heads, width, generator=generator).to(dtype)
        return q, cache, TopKIndices(slots, counts_T), width**-0.5

    label = f"{heads}x{widths[0]}+{widths[1]}-{counts}of{most}{'-fp8' if fp8 else ''}"
    return Case(label.replace(" ", ""), make)


@op(
    [
        _sparse_case([1, 300, 77], 300, 16, (512, 64)),
        _sparse_case([16, 16, 0, 3, 16], 16, 5, (40, 8)),
        _sparse_case([64], 64, 72, (64, 16)),
        _sparse_case([32, 9], 32, 16, (512, 64), fp8=True),
    ],
    REDUCTION,
)
def sparse_latent_attention(q_THK: Tensor, cache: LatentLayer, topk: TopKIndices, scale: float) -> Tensor:
    """Each head's weighted sum of the latents of the top-k tokens, [T, H, C]; 0 without any.

    The weights are softmax(scale * q kᵀ), where k is a whole row of the cache.
    """
    tokens, most = topk.slots_TJ.shape
    heads, width = q_THK.shape[1:]
    out_THC = q_THK.new_empty(tokens, heads, cache.latent_width)
    for chunk in in_chunks(tokens, most * max(heads, width)):
        hidden_T1J = (topk.slots_TJ[chunk] < 0).unsqueeze(1)
        # Padding repeats the first slot: other slots may hold NaN.
        first_T1 = topk.slots_TJ[chunk, :1].clamp(min=0)
        slot_TJ = torch.where(hidden_T1J.squeeze(1), first_T1, topk.slots_TJ[chunk])
        rows_TJK = read_latent(cache, slot_TJ.flatten().long(), q_THK.dtype).view(*slot_TJ.shape, width)
        score_THJ = torch.bmm(q_THK[chunk], rows_TJK.mT).float() * scale
        weight_THJ = score_THJ.masked_fill_(hidden_T1J, torch.finfo(torch.float32).min).softmax(-1)
        sum_THC = torch.bmm(weight_THJ.to(q_THK.dtype), rows_TJK[..., : cache.latent_width])
        out_THC[chunk] = sum_THC.masked_fill_(hidden_T1J[..., :1], 0)
    return out_THC
