"""The parameters of a decoder, and how they are read from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel.sharding import head_shard
from workers.layers.attention.rotary import NoRope, Rope
from workers.layers.attention.window import Windows
from workers.layers.weighted import ShardRange

_DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """Names of a layer's norms in the checkpoint; None: a layer has no such norm."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORMS = LayerNorms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORMS = LayerNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
SANDWICH_NORMS = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True, kw_only=True)
class DecoderArgs:
    """The parameters of a decoder. The fields without a default come from `common_fields`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised before RoPE."""
    norm_across_heads: bool = False
    """Whether the queries of all heads are normalised together before RoPE, and their keys."""
    qk_interleaved_on_disk: bool = False
    """Whether RoPE's pairs are neighbouring rows of the checkpoint's queries and keys (GPT-J): loading moves
    the first ones of a head before the others (NeoX)."""
    qkv_fused_on_disk: bool = False
    """Whether the checkpoint has one matrix for queries, keys and values."""
    mlp_fused_on_disk: bool = False
    """Whether it has one matrix for gate and up."""
    windows: Windows = ()
    """Sliding window of each layer; empty: full attention in every layer."""
    chunked: bool = False
    """Whether windows do not slide: queries see the tokens from the last multiple of the window on."""
    ropes: tuple[Rope | NoRope | None, ...] = ()
    """RoPE parameters of each layer, or none; empty: `rope_parameters` in every layer."""
    rope_interleaved: bool = False
    """RoPE style: pairs of neighbouring features (GPT-J), or of both halves (NeoX)."""
    zero_centred_norms: bool = False
    """Whether the checkpoint stores RMSNorm weights minus one."""
    norms: LayerNorms = PRE_NORMS
    attention_scale: float | None = None
    """Softmax scale; None: 1 / sqrt(head_dim)."""
    sees_ahead: bool = False
    """Whether tokens of images see some after their own: see `AttentionPlan.ahead_T`."""
    attention_soft_cap: float = 0.0
    """Attention scores s become cap * tanh(s / cap); 0: they stay as they are."""
    logits_soft_cap: float = 0.0
    """The same for the logits."""
    embedding_scale: float = 1.0
    """Factor of the embeddings, but not of a tied LM head."""
    logits_scale: float = 1.0
    """Factor of the logits."""
    sinks: bool = False
    """Whether each query head has a learned attention-sink logit."""
    attention_inputs: int = 0
    """Features that attention reads; 0: `hidden_size`."""
    mtp_layers: int = 0
    """Layers for multi-token prediction that are built; they cache as the others do, with full attention."""

    @property
    def cached_layers(self) -> int:
        """Layers with a cache."""
        return self.num_hidden_layers + self.mtp_layers

    def head_ranges(self, tp: int, rank: int) -> tuple[ShardRange, ShardRange]:
        """The query heads of `rank` among `tp` ranks, and its key/value heads, which others may have too."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        shard = head_shard(heads, kv_heads, tp, rank)
        queries = ShardRange(heads, shard.q_start, shard.q_count)
        return queries, ShardRange(kv_heads, shard.kv_start, shard.kv_count)


def common_fields(config: Mapping[str, Any], partial_rotary: bool = False) -> dict[str, Any]:
    """The fields of `DecoderArgs` that have the same name in every family's config.json.

    rope_parameters take precedence over rope_theta and partial_rotary_factor at the top level.
    `partial_rotary`: whether the family supports RoPE on a part of each head. Raises KeyError for a
    missing field, ValueError for an unsupported value.
    """
    heads = config["num_attention_heads"]
    top_level = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    rope = {"rope_theta": _DEFAULT_ROPE_THETA, **top_level, **config["rope_parameters"]}
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not partial_rotary:
        raise ValueError(f"{config['model_type']} with a partial_rotary_factor other than 1 is not supported")
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config["rms_norm_eps"],
        "hidden_act": config.get("hidden_act", "silu"),
        "rope_parameters": rope,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }
