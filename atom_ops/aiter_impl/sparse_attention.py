"""Attention to top-k latents: a decode in which each token is a row, and its top-k slots are the pages.

Indexer keys and the top-k selection have no provider here. AITER's scores need float8 queries and keys copied
out of the cache; its selection returns the top-k in any order and leaves open which of equal scores it takes.
The indexer runs on every rank, and all must select the same tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from atom_ops.aiter_impl import NEEDS, runs_on
from atom_ops.aiter_impl.latent_attention import (
    decode_latents,
    takes_decodes,
    takes_latents,
    with_padding_heads,
)
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.latent.latent_cache import LatentLayer
from atom_ops.ops.latent.sparse_attention import TopKIndices, sparse_latent_attention


@sparse_latent_attention.provider(
    "aiter",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda q_THK, cache, topk, scale: (
        takes_latents(q_THK, cache)
        and not topk.split_tokens
        and takes_decodes(_plan_from(topk), q_THK.shape[1])
    ),
    batch_invariant=False,
)
def _sparse_latent_attention(q_THK: Tensor, cache: LatentLayer, topk: TopKIndices, scale: float) -> Tensor:
    heads = q_THK.shape[1]
    blocks_of_one = replace(cache, rows=cache.rows.view(-1, 1, cache.rows.shape[2]))
    out_THC = decode_latents(with_padding_heads(q_THK), blocks_of_one, _plan_from(topk), scale)
    return out_THC[:, :heads].masked_fill((topk.counts_T == 0)[:, None, None], 0)


def _plan_from(topk: TopKIndices) -> AttentionPlan:
    """A plan with a row for each token, whose context is its top-k tokens in blocks of one."""
    tokens, most = topk.slots_TJ.shape
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=topk.slots_TJ.device)
    return AttentionPlan(topk.slots_TJ, topk.counts_T, starts, tokens, 1, 1, most)
