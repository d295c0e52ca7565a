"""A step whose tokens pass the layers in parts: the all-reduces of one part run while another is computed.

Attention computes all tokens at once, everything else those of each part.

T tokens, D hidden, O features.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch

from workers.layers.attention.rotation import Rotation
from workers.layers.attention.self_attention import SelfAttention
from workers.layers.context import ForwardContext
from workers.layers.decoder.decoder_args import PRE_NORMS
from workers.layers.decoder.decoder_layer import DecoderLayer
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.norm import NormAcrossRanks, RMSNorm

_Part = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""(norm(x + residual), x + residual) of some of a step's tokens, for which the caller waits."""


def can_overlap(layer: DecoderLayer) -> bool:
    """Whether `forward_in_parts` can compute this layer."""
    attention = layer.token_mixer
    if layer.norm_names != PRE_NORMS or not isinstance(attention, SelfAttention):
        return False
    return isinstance(layer.mlp, GatedMLP) and not isinstance(attention.q_norm, NormAcrossRanks)


def forward_in_parts(
    layers: Sequence[DecoderLayer],
    last_norm: RMSNorm,
    embedded: Sequence[torch.Tensor],
    rotations: Sequence[Rotation],
    ctx: ForwardContext,
) -> torch.Tensor:
    """The hidden states [T, D] after `last_norm`; `embedded` are the embeddings of each part."""
    first, *others = [*(_norm(layer, PRE_NORMS.before_attention) for layer in layers), last_norm]
    parts: list[_Part] = [partial(first.add_norm, part_TD, None) for part_TD in embedded]
    for layer, next_norm, rotation in zip(layers, others, rotations, strict=True):
        parts = _layer_in_parts(layer, parts, next_norm, rotation, ctx)
    return torch.cat([end()[0] for end in parts])


def _layer_in_parts(
    layer: DecoderLayer, parts: Sequence[_Part], next_norm: RMSNorm, rotation: Rotation, ctx: ForwardContext
) -> list[_Part]:
    """From after the norm before attention to after `next_norm`, that of the next layer."""
    attention, mlp = layer.token_mixer, layer.mlp
    assert isinstance(attention, SelfAttention) and isinstance(mlp, GatedMLP)
    qkv = []
    residuals = []
    for end in parts:
        normed_TD, residual_TD = end()
        qkv.append(attention.qkv_proj(normed_TD))
        residuals.append(residual_TD)
    outs = attention.attend(torch.cat(qkv), rotation, ctx).split([len(part) for part in qkv])
    norm = _norm(layer, PRE_NORMS.before_mlp)
    parts = [
        norm.begin_add_norm(attention.o_proj(out_TO), residual_TD)
        for out_TO, residual_TD in zip(outs, residuals, strict=True)
    ]
    done = []
    for end in parts:
        normed_TD, residual_TD = end()
        done.append(next_norm.begin_add_norm(mlp(normed_TD), residual_TD))
    return done


def _norm(layer: DecoderLayer, name: str | None) -> RMSNorm:
    return cast(RMSNorm, layer.norm(name))
