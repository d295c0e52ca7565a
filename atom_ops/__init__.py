"""Kernels: every op that the workers call, independent of any model.

Shape suffixes: T tokens, D hidden size, H query heads, K key/value heads, E head dimension,
F half of a gated projection, I and O input and output features, R sampling rows, V vocabulary,
P positions, X experts, J top-k experts of a token; recurrent layers have letters of their own.
Tensors are contiguous unless a docstring says otherwise.
"""

import atom_ops.ops.linear.cpu_linear  # noqa: F401  its providers
from atom_ops.attention_backend import (
    INTERLEAVED_KV,
    AttentionBackend,
    AttentionConfig,
    attention_backend,
    register_attention_backend,
)
from atom_ops.ops.attention.attention import AttentionPlan, AttentionRule, paged_attention, plan_attention
from atom_ops.ops.attention.attention_plan import BATCH_INVARIANT_SPLIT, NoHostRowsError, empty_attention
from atom_ops.ops.attention.block_rows import BlockTensors, gather_block_rows, scatter_block_rows
from atom_ops.ops.attention.fused_attention import attend_projection
from atom_ops.ops.attention.kv_cache import KVLayer, kv_bytes_per_block, make_kv_layer, write_kv
from atom_ops.ops.attention.kv_indices import KVIndices, kv_indices
from atom_ops.ops.attention.partial_attention import merge_partials, pack_partials, unpack_partials
from atom_ops.ops.attention.qkv import HeadNorms, rotate_and_write_kv, rotated_heads
from atom_ops.ops.attention.rotary import rotary, rotation, rotation_at
from atom_ops.ops.attention.wide_norms import normalised_queries_keys, query_key_squares
from atom_ops.ops.elementwise.activation import (
    clamped_swiglu,
    gelu_tanh_and_mul,
    sigmoid_and_mul,
    silu_and_mul,
)
from atom_ops.ops.elementwise.embedding import embedding
from atom_ops.ops.elementwise.hyper_connection import (
    HyperWeights,
    hyper_collapse,
    hyper_expand,
    hyper_head,
)
from atom_ops.ops.elementwise.norm import add_rms_norm, gated_rms_norm, rms_norm
from atom_ops.ops.experts.expert_slots import ExpertSlots, select_slots
from atom_ops.ops.experts.experts import (
    ClampedSwiglu,
    ExpertActivation,
    ExpertRole,
    ExpertWeights,
    experts,
    pack_expert_weight,
)
from atom_ops.ops.experts.routing import RoutingRule, route, weigh_inputs, weights_of_experts
from atom_ops.ops.latent.compressed_rows import (
    CachedRows,
    compress_rows,
    compressed_attention,
    make_rows,
    normed_queries,
    rows_of_block,
    write_normed_rows,
    write_rows,
)
from atom_ops.ops.latent.index_keys import (
    IndexKeys,
    IndexNorm,
    index_bytes_per_block,
    make_index_keys,
    write_index_keys,
)
from atom_ops.ops.latent.latent_attention import (
    absorb_queries,
    expand_values,
    latent_attention,
    partial_latent_attention,
    prompt_attention,
)
from atom_ops.ops.latent.latent_cache import (
    LatentLayer,
    LatentNorms,
    keep_latents,
    latent_bytes_per_block,
    latents_of_step,
    make_latent_layer,
    norm_and_write_latents,
    read_latent,
    write_latent,
)
from atom_ops.ops.latent.latent_queries import latent_queries
from atom_ops.ops.latent.sparse_attention import TopKIndices, index_topk, sparse_latent_attention
from atom_ops.ops.linear.fused_linear import add_norm_linear, silu_and_mul_linear
from atom_ops.ops.linear.linear import linear, pack_linear_weight
from atom_ops.ops.linear.linear_argmax import linear_argmax
from atom_ops.ops.recurrent.causal_conv import causal_conv
from atom_ops.ops.recurrent.gated_delta_rule import DecayWeights, gated_delta_rule
from atom_ops.ops.recurrent.kimi_delta_attention import kimi_delta_attention
from atom_ops.ops.recurrent.recurrent_state import (
    StateLayer,
    StatePart,
    StatePlan,
    StateShape,
    empty_states,
    make_state_layer,
    plan_states,
)
from atom_ops.ops.sampling.decode_inputs import DecodeInputs, decode_inputs
from atom_ops.ops.sampling.draft_inputs import NO_DRAFT, DraftInputs, RowState, draft_inputs
from atom_ops.ops.sampling.logits_processors import (
    LogitsProcessorBatch,
    TokenRecord,
    apply_logits_processors,
    record_sampled,
)
from atom_ops.ops.sampling.logprobs import TokenLogprobs, token_logprobs
from atom_ops.ops.sampling.ngram import NgramRule, TokenHistory, propose_ngrams
from atom_ops.ops.sampling.sampling import SamplingBatch, sample
from atom_ops.ops.sampling.sharded_argmax import merge_argmax, shard_argmax
from atom_ops.ops.sampling.suffix import NO_NUMBER, RecentOutputs, propose_suffixes, record_outputs
from atom_ops.ops.sampling.token_bitmask import apply_token_bitmask
from atom_ops.ops.sampling.token_shard import ALL_TOKENS, TokenShard
from atom_ops.ops.sampling.verification import verify_drafts
from atom_ops.transfer import to_device
from atom_ops.weights import (
    MXFP4,
    AffineInts,
    BlockFP8,
    ChannelFP8,
    ChannelINT8,
    GroupINT4,
    Packed,
    PackedINT4,
    PackedInts,
    PackedOneDNN,
    PackedPanels,
    Quantized,
    Reordered,
    Weight,
    tensors_of,
)

__all__ = [
    "ALL_TOKENS",
    "BATCH_INVARIANT_SPLIT",
    "INTERLEAVED_KV",
    "MXFP4",
    "NO_DRAFT",
    "NO_NUMBER",
    "AffineInts",
    "AttentionBackend",
    "AttentionConfig",
    "AttentionPlan",
    "AttentionRule",
    "BlockFP8",
    "BlockTensors",
    "CachedRows",
    "ChannelFP8",
    "ChannelINT8",
    "ClampedSwiglu",
    "DecayWeights",
    "DecodeInputs",
    "DraftInputs",
    "ExpertActivation",
    "ExpertRole",
    "ExpertSlots",
    "ExpertWeights",
    "GroupINT4",
    "HeadNorms",
    "HyperWeights",
    "IndexKeys",
    "IndexNorm",
    "KVIndices",
    "KVLayer",
    "LatentLayer",
    "LatentNorms",
    "LogitsProcessorBatch",
    "NgramRule",
    "NoHostRowsError",
    "Packed",
    "PackedINT4",
    "PackedInts",
    "PackedOneDNN",
    "PackedPanels",
    "Quantized",
    "RecentOutputs",
    "Reordered",
    "RoutingRule",
    "RowState",
    "SamplingBatch",
    "StateLayer",
    "StatePart",
    "StatePlan",
    "StateShape",
    "TokenHistory",
    "TokenLogprobs",
    "TokenRecord",
    "TokenShard",
    "TopKIndices",
    "Weight",
    "absorb_queries",
    "add_norm_linear",
    "add_rms_norm",
    "apply_logits_processors",
    "apply_token_bitmask",
    "attend_projection",
    "attention_backend",
    "causal_conv",
    "clamped_swiglu",
    "compress_rows",
    "compressed_attention",
    "decode_inputs",
    "draft_inputs",
    "embedding",
    "empty_attention",
    "empty_states",
    "expand_values",
    "experts",
    "gated_delta_rule",
    "gated_rms_norm",
    "gather_block_rows",
    "gelu_tanh_and_mul",
    "hyper_collapse",
    "hyper_expand",
    "hyper_head",
    "index_bytes_per_block",
    "index_topk",
    "keep_latents",
    "kimi_delta_attention",
    "kv_bytes_per_block",
    "kv_indices",
    "latent_attention",
    "latent_bytes_per_block",
    "latent_queries",
    "latents_of_step",
    "linear",
    "linear_argmax",
    "make_index_keys",
    "make_kv_layer",
    "make_latent_layer",
    "make_rows",
    "make_state_layer",
    "merge_argmax",
    "merge_partials",
    "norm_and_write_latents",
    "normalised_queries_keys",
    "normed_queries",
    "pack_expert_weight",
    "pack_linear_weight",
    "pack_partials",
    "paged_attention",
    "partial_latent_attention",
    "plan_attention",
    "plan_states",
    "prompt_attention",
    "propose_ngrams",
    "propose_suffixes",
    "query_key_squares",
    "read_latent",
    "record_outputs",
    "record_sampled",
    "register_attention_backend",
    "rms_norm",
    "rotary",
    "rotate_and_write_kv",
    "rotated_heads",
    "rotation",
    "rotation_at",
    "route",
    "rows_of_block",
    "sample",
    "scatter_block_rows",
    "select_slots",
    "shard_argmax",
    "sigmoid_and_mul",
    "silu_and_mul",
    "silu_and_mul_linear",
    "sparse_latent_attention",
    "tensors_of",
    "to_device",
    "token_logprobs",
    "unpack_partials",
    "verify_drafts",
    "weigh_inputs",
    "weights_of_experts",
    "write_index_keys",
    "write_kv",
    "write_latent",
    "write_normed_rows",
    "write_rows",
]
