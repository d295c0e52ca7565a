"""Kernels: every op the workers call, and nothing that knows a model.

Shapes in names: T tokens, D hidden, H query heads, K key/value heads, E head dimension,
F half of a gated projection, I and O in and out features, R rows that draw, V vocabulary,
P positions. Tensors are contiguous unless a docstring says otherwise.
"""

from atom_ops.ops.activation import silu_and_mul
from atom_ops.ops.attention import AttentionPlan, paged_attention, plan_attention
from atom_ops.ops.embedding import embedding
from atom_ops.ops.kv_cache import KVLayer, kv_bytes_per_block, make_kv_layer, write_kv
from atom_ops.ops.linear import linear, pack_linear_weight
from atom_ops.ops.norm import add_rms_norm, rms_norm
from atom_ops.ops.rotary import rotary
from atom_ops.ops.sampling import SamplingBatch, sample

__all__ = [
    "AttentionPlan",
    "KVLayer",
    "SamplingBatch",
    "add_rms_norm",
    "embedding",
    "kv_bytes_per_block",
    "linear",
    "make_kv_layer",
    "pack_linear_weight",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rotary",
    "sample",
    "silu_and_mul",
    "write_kv",
]
